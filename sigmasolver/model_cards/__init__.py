"""What is known of a pretrained model: how it is measured (`score`), shown at work (`demonstrate`), put into a folder
(`make`) and told (`text`)."""

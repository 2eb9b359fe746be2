"""What is known of a pretrained model: how it is measured (`score`), put into a folder (`make`) and told (`text`)."""

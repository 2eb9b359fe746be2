"""Trajectories, and the training samples cut from them.

layout, header, domain   fields and axes of trajectories, their origin, and the physical meaning of their numbers
store, slots             an HDF5 file of trajectories, and its crash-safe writer
reader, formats          readers of stores, and of foreign files in place
split, windows           training, validation and test splits; history and future of a sample
normalise, moments       normalisation of fields; mean and variance of values that arrive in blocks
mask                     solid regions, which are excluded everywhere
prefetch                 batches read ahead of time
inspect, constant        statistics, problems and a plot of a data set; fields that are constant in time
isolated, worker         foreign libraries in a separate process, which a damaged file may crash
"""

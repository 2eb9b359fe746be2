"""Trajectories and what is cut out of them.

layout, header, domain   what trajectories hold, where they come from, what their numbers mean
store, slots             one HDF5 file of them, and how it is written so that a kill does no harm
reader, formats          reading them: a store, or other people's files in place
split, windows           training, validation and test; history and future of one sample
normalise, moments       units to what a network sees and back; means and deviations of values that come in parts
mask                     solids, which count nowhere
prefetch                 batches read ahead of time
inspect, constant        what is in a file: statistics, problems, a picture; fields that never change
isolated, worker         foreign libraries in a process of their own, which a damaged file may crash
"""

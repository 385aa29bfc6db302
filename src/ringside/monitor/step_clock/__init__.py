"""A training step cut into phases: data, forward, backward, exposed synchronisation, optimizer.

clock  Cuts a rank's time into training steps and their phases
draft  A finished training step before its record is worked out, and marks in a device's queue of work, by which it is
       timed where the host only queues what the device does later
"""

"""A training step cut into phases: data, forward, backward, exposed synchronisation, optimizer.

clock          Cuts a rank's time into training steps and their phases
device_events  Marks in a device's queue of work, by which a step is timed where the host only queues what the device
               does later
draft          A finished training step before its record is worked out: what the training thread had to look up, and no
               more
"""

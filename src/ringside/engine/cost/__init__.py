"""What a schedule takes on measured links, by replaying it.

model    What an all-reduce will take, worked out from its schedule and what is known of the links
network  What is known of the links between ranks or hosts: as numbers, and as the topology that `ringside probe` writes
replay   A schedule replayed as a max-plus clock: when every chunk is where, given a network
"""

"""What a schedule takes on measured links, by replaying it.

model    What an all-reduce will take, by replaying its schedule as a max-plus clock over what is known of the links
network  What is known of the links between ranks or hosts: as numbers, and as the topology that `ringside probe` writes
"""

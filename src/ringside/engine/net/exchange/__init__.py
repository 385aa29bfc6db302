"""A schedule over messages: compiled for one vertex, then run with segments in flight.

block_scaling    How f32 elements travel in a quarter of their bits: blocks of 32 codes of 8 bits with one scale,
                 rounded in place
compression      How f32 elements travel when half of the bits shall do: rounded to bfloat16 or float16 by the sender,
                 in place
device           Schedules on the device where the tensors are: point-to-point of the user's own process group, NCCL's
                 on GPUs
exchange         One vertex's links to the others, and what stays between collectives: receive buffers, counters,
                 sizes of messages; channels, each with a thread of its own
in_flight        How many messages a long link has on their way, and over how many connections
message_size     How large the messages of a collective are
ordering         In which order segments are sent and received, so that every link stays busy
persistent       A small collective on one vertex, worked out beforehand: what is left to be done is to send, to wait
                 and to add up
pipeline         A large tensor on its way through shared memory, between hosts and back, piece by piece
plan             Compile a schedule into what one vertex sends and receives, for transports that carry messages
receive_buffers  What one vertex receives: buffers posted ahead of the messages, and messages by their number in a
                 collective
route            Which messages one vertex sends and receives in a collective, in which order: worked out once for all
                 that are alike
run              Runs one vertex's part of any schedule over a transport: the interpreter between hosts
signature        The header that vertices send before a collective's first element: what each of them called
wire             How f32 elements travel between hosts where not as they are: what each way has to do, and which there
                 are
"""

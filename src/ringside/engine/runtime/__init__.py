"""What engines run on: a queue of collectives, worker threads, timers, Ctrl-C, closing in good order.

interrupts  Ctrl-C while the main thread waits inside torch, which Python by itself hears of only when the wait is over
queue       Collectives one at a time, in the order of their calls, each by whoever waits for it
timer       An alarm that one thread sleeps on and any other sets, without the sleeper being woken for it
worker      One thread that carries out a communicator's asynchronous collectives in the order they were submitted, and
            the end of both
"""

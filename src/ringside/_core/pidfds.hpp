// Descriptors of watched processes: one per process, however many communicators watch it.
#pragma once

namespace ringside {

// Takes a pidfd over. Returns the one that is held of the same process already, or `fd`; each to be released once.
int share_pidfd(int fd);
void release_pidfd(int fd);

}  // namespace ringside

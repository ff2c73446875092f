/* What the program `sudo` and the agent agree about. See sudo.c and sudo_client.c. */
#ifndef ATOLL_SUDO_H
#define ATOLL_SUDO_H

#include <stdint.h>

#define SUDO_SOCKET "/run/atoll/sudo.socket"

enum { SUDO_MAGIC = 0x31647573, MOST_SUDO_BYTES = 200000, SUDO_FDS = 3, SUDO_READY = 'r' };

/* The agent sends one byte, SUDO_READY, before it reads. A request is this head, with the three standard descriptors attached to it, then fields as in START: ARG, ENV, CWD, USER and
 * FLAGS (PTY: descriptor 0 becomes the controlling terminal). Without ARG it asks whether the caller may. After that each byte is
 * the number of a signal for the command, and the end of the connection kills the command. */
struct sudo_head {
    uint32_t magic, length;
};

enum sudo_answer { SUDO_ENDED = 1, SUDO_ALLOWED = 2, SUDO_REFUSED = 3, SUDO_FAILED = 4 };

/* The only answer. ENDED: `number` is the wait status. FAILED: it is an errno; the command was not started. */
struct sudo_reply {
    uint32_t answer, number;
};

int sudo_client(int argc, char **argv);

#endif

/* The supervisor of set-id bits: see guard.c. */
#ifndef ATOLL_GUARD_H
#define ATOLL_GUARD_H

#include <linux/filter.h>
#include <stdbool.h>

int supervise(int channel, bool with_virtual_kernel);
int install_supervised(struct sock_fprog *program, int channel);

#endif

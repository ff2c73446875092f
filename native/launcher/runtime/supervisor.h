/* The declarations that the parts of the supervisor of set-id bits share: see supervisor.c. Functions return a negative errno. */
#ifndef ATOLL_SUPERVISOR_H
#define ATOLL_SUPERVISOR_H

#include <linux/ioctl.h>
#include <linux/seccomp.h>

#include "runtime.h"

enum { MAX_CALLER_GROUPS = 1024 };

struct caller {
    int proc, root, cwd, memory, userns, network, ipc;
    unsigned umask, uid, gid, groups[MAX_CALLER_GROUPS];
    unsigned long group_count;
    uint64_t capabilities;
};

struct call {
    uint64_t id;
    int at;        /* the directory from which the path starts (or AT_FDCWD), or the file itself */
    bool on_file;  /* there is no path: `at` is the file */
    bool makes;    /* it opens a file and may create it; otherwise it changes a mode */
    char path[MAX_PATH];
    unsigned mode;
    int flags;
};

/* Where a call is carried out. */
struct place {
    int root;    /* the caller's root directory */
    int answers; /* /proc/self/fd, where this process's descriptors have names */
    bool with_virtual_kernel;
};

long open_caller(struct caller *, uint32_t pid); /* caller.c */
long become(struct caller *);
long understand(const struct caller *, const struct seccomp_notif *, struct call *); /* call.c */
long carry_out(const struct call *, const struct place *); /* returns a descriptor of the opened file, or 0 if the call opens none */

#endif

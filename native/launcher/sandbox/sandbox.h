/* What the two processes of atoll-native share. Read main.c first. */
#ifndef ATOLL_SANDBOX_H
#define ATOLL_SANDBOX_H

#include "../core/core.h"

enum {
    MAX_GROUPS = 16,    /* control group hierarchies */
    MAX_STRINGS = 8192, /* arguments and environment */
};

/* What the host part and the first process tell each other. They share memory until the agent is executed. */
struct shared {
    int groups[MAX_GROUPS], group_count;
    int told;               /* the id maps are written, and the words for this sandbox are there */
    int host_done;          /* the host part did all it was told: only now the agent may run */
    int alive;              /* the kernel clears it when the first process executes the agent, or dies */
    int executing;          /* it went as far as that */
    long error;             /* why the first process gave up */
    struct worker inside;   /* what it was doing */
    unsigned long identity; /* who it becomes inside */
    bool keeps_groups;      /* it may not change its groups: it has one id, and the kernel allows no more */
    int launcher;           /* a pidfd of the host part */
    int listener, agent;
    int guard;              /* a socket to the supervisor of set-id bits; -1: the filter needs none */
    char *words, *words_end; /* those of this sandbox; before them come those that are the same for all */
    char *filter;           /* the seccomp program */
    size_t filter_bytes;
};
extern struct shared shared;
extern int first_pid; /* the sandbox's first process; 0: none yet */

__attribute__((noreturn)) void launcher_gives_up(struct worker *, long error); /* main.c */
void report_first(void);
void report_ready(void);
void remove_tree(struct worker *, const char *path);          /* removal.c */
void host_part(char *words, char *end);                       /* host.c */
_Noreturn void first_process(void);                           /* first.c */

#endif

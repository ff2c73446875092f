/* The declarations that the two processes of atoll-native share. Read main.c first. */
#ifndef ATOLL_SANDBOX_H
#define ATOLL_SANDBOX_H

#include "../core/core.h"

enum {
    MAX_GROUPS = 16,    /* control group hierarchies */
    MAX_STRINGS = 8192, /* arguments and environment */
};

/* The communication of the host part and the first process, which share memory until the agent is executed. */
struct shared {
    int groups[MAX_GROUPS], group_count;
    int told;               /* the id maps are written, and the words for this sandbox have arrived */
    int host_done;          /* the host part has done everything; only now may the agent run */
    int alive;              /* the kernel clears it when the first process executes the agent or dies */
    int executing;          /* the first process has reached the execution of the agent */
    long error;             /* why the first process failed */
    struct worker inside;   /* its current step */
    unsigned long identity; /* its ids inside */
    bool keeps_groups;      /* it may not change its groups, because only one id is mapped */
    int launcher;           /* a pidfd of the host part */
    int listener, agent;
    int guard;              /* a socket to the supervisor of set-id bits, or -1 if the filter needs none */
    char *words, *words_end; /* the words of this sandbox, after those that are the same for all */
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

/* What the parts of the launcher share. Read main.c first. */
#ifndef ATOLL_NATIVE_H
#define ATOLL_NATIVE_H

#include "system.h"

enum {
    MOST_SLOTS = 320,       /* mounts that the host part hands over */
    MOST_GROUPS = 16,       /* control group hierarchies */
    MOST_STRINGS = 8192,    /* arguments and environment */
    LARGEST_LIST = 4 << 20, /* bytes of words */
    LONGEST_PATH = 4096,
    LONGEST_NAME = 255,
};

/* One of the two processes, and what it is doing: the first thing a failure tells. */
struct worker {
    const char *step, *detail;
    __attribute__((noreturn)) void (*give_up)(struct worker *, long error);
};

/* Words that end with NUL, each operation with a fixed number of them. */
struct list {
    char *at, *end;
};

char *next_word(struct list *, struct worker *);
unsigned long next_number(struct list *, struct worker *);
bool has_flag(const char *flags, const char *name);
uint64_t attribute_flags(const char *flags);

static inline long need(struct worker *worker, long result)
{
    if (result < 0)
        worker->give_up(worker, -result);
    return result;
}

/* What the host part and the first process tell each other. They share memory until the agent is executed. */
struct shared {
    int slots[MOST_SLOTS];  /* 0: not yet; else a descriptor + 1 */
    int groups[MOST_GROUPS], group_count;
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
    struct list early;      /* words for the first process that are the same for all sandboxes */
    struct list words;      /* and those of this one */
    char *filter;           /* the seccomp program */
    size_t filter_bytes;
};
extern struct shared shared;

void futex_wait(int *word, int value);
void futex_wake(int *word);

/* mounts.c: a mount is a descriptor until it is attached. */
int new_filesystem(struct worker *, const char *type, uint64_t attributes, char *options);
int clone_tree(struct worker *, int at, const char *path, unsigned flags, uint64_t attributes, int userns);
long attach(int mount, int at, const char *path);
int open_inside(int root, const char *path, uint64_t resolve, int flags);
int mount_point(struct worker *, int root, const char *path, bool directory, bool strict);
bool is_directory(struct worker *, int fd);

/* volumes.c: the sandbox's ids from `first` on, and what all but its root are on the disk. */
struct volume_ids {
    unsigned long first, count, others;
};
int clone_volume(struct worker *, const char *source, const char *flags, const struct volume_ids *);

void remove_tree(struct worker *, const char *path); /* removing.c */
void host_part(struct list *words);    /* host.c */
_Noreturn void first_process(void);    /* inside.c */
_Noreturn void run(int count, char **arguments); /* main.c */

#endif

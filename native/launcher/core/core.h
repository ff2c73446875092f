/* The code that both launchers share: words of a plan, mounts, paths of an image, id maps, the last steps before the agent. Each
 * program adds its own operations and its own way to report failures (`give_up`). */
#ifndef ATOLL_CORE_H
#define ATOLL_CORE_H

#include <linux/fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <linux/stat.h>

#include "system.h"

enum {
    MAX_SLOTS = 320,     /* mounts that are not attached yet */
    MAX_LIST = 4 << 20,  /* bytes of words */
    MAX_PATH = 4096,
    MAX_NAME = 255,
    MAX_TEXT = 1024,
};
/* Constants that the kernel's headers do not export, because C libraries define them. */
enum { KILL_SIGNAL = 9, CHILD_SIGNAL = 17, DETACH_MOUNT = 2 /* MNT_DETACH */, KEEP_LINK = 8 /* UMOUNT_NOFOLLOW */ };

/* A process that executes words, with its current step and detail, which a failure reports. */
struct worker {
    char *at, *end; /* the remaining words: each ends with NUL, and each operation has a fixed number of them */
    const char *step, *detail;
    bool alone; /* no other process makes mounts, so waiting for a missing one is an error */
    __attribute__((noreturn)) void (*give_up)(struct worker *, long error);
};

static inline long need(struct worker *worker, long result)
{
    if (result < 0)
        worker->give_up(worker, -result);
    return result;
}

/* -- words.c -- */
char *next_word(struct worker *);
unsigned long next_number(struct worker *);
char *next_subject(struct worker *); /* the next word, which becomes the detail of a failure */
bool has_flag(const char *flags, const char *name);
uint64_t attribute_flags(const char *flags);

/* -- text.c: text that does not fit is cut off -- */
struct text {
    char bytes[MAX_TEXT];
    size_t length;
};
void add(struct text *, const char *more);
void add_number(struct text *, unsigned long number);
void add_failure(struct text *, const struct worker *, long error); /* `failed ERRNO STEP DETAIL` */
struct text proc_path(unsigned long pid, const char *name);        /* /proc/PID/NAME */
bool parse_number(const char **at, unsigned base, unsigned long *number); /* false: no number there */

/* -- slots.c: numbers for mounts that are not attached yet and exist only as descriptors -- */
void futex_wait(int *word, int value);
void futex_wake(int *word);
void publish(struct worker *, unsigned long slot, int mount);
int take(struct worker *, unsigned long slot); /* waits until it is published */

/* -- mounts.c -- */
int new_filesystem(struct worker *, const char *type, uint64_t attributes, char *options);
int clone_tree(struct worker *, int at, const char *path, unsigned flags, uint64_t attributes, int userns);
long attach(int mount, int at, const char *path);
void mount_overlay(struct worker *, const char *target, const char *flags, char *options);

/* -- paths.c -- */
int open_inside(int root, const char *path, uint64_t resolve, int flags);
int mount_point(struct worker *, int root, const char *path, bool directory, bool strict);
bool is_directory(struct worker *, int fd);
void write_text(struct worker *, int fd, const char *text);
void write_file(struct worker *, const char *path, const char *text);

/* -- idmaps.c -- */
int mapped_namespace(struct worker *, const char *users, const char *groups);
/* The sandbox's ids from `first` on, and the ids from `others` on that all but its root have on disk. */
struct volume_ids {
    unsigned long first, count, others;
};
int clone_volume(struct worker *, const char *source, const char *flags, const struct volume_ids *);

/* -- host.c, inside.c: the operations that both programs support. They return false for other operations -- */
bool host_operation(struct worker *, const char *op, int userns); /* USERNS: the user namespace for `mapped`, or -1 if there is none yet */

/* The sandbox's file tree while it is assembled. */
struct tree {
    int root;      /* the sandbox's root directory; paths of the image resolve below it */
    int base;      /* the mount below which `cover` and `shadow` work */
    int covers[2]; /* an empty file and an empty directory, not yet used */
};
#define NO_TREE {.root = -1, .base = -1, .covers = {-1, -1}}
bool inside_operation(struct worker *, struct tree *, const char *op);
void enter_stage(struct worker *, const char *path, int stage);

/* -- confinement.c -- */
long set_capabilities(uint64_t);
void keep_only(struct worker *, uint64_t capabilities);
void install_filter(struct worker *, char *code, size_t length, int guard);

/* The kernel's struct msghdr, for messages with descriptors. */
struct message {
    void *name;
    int name_length;
    struct iovec *parts;
    size_t part_count;
    void *control;
    size_t control_length;
    int flags;
};
struct rights {
    size_t length;
    int level, type;
    int fds[4];
};
enum { RIGHTS_HEADER = sizeof(size_t) + 2 * sizeof(int), SOCKET_LEVEL = 1, RIGHTS_TYPE = 1 };
enum { CLOEXEC_RIGHTS = 0x40000000 /* MSG_CMSG_CLOEXEC */, NO_SIGNAL = 0x4000 /* MSG_NOSIGNAL */ };

_Noreturn void run(int count, char **arguments); /* the entry point, which each program defines */

#endif

/* A command that was started, as process.c and supervise.c see it. */
#ifndef ATOLL_PROCESS_H
#define ATOLL_PROCESS_H

#include "agent.h"

#include <sys/resource.h>

enum { CHANNELS = 3, MAX_RLIMITS = 16, MAX_GROUPS = 64, STATUS_FD = 9 };

enum stage { STAGE_NONE, STAGE_SETUP, STAGE_CWD, STAGE_USER, STAGE_EXEC };

/* All that the new process needs, made ready before it is cloned: it shares our memory and may not allocate. */
struct launch {
    char **argv, **envp, **programs; /* the programs to try, in order; NULL-terminated */
    char *cwd;
    bool change_user;
    uid_t uid;
    gid_t gid;
    gid_t groups[MAX_GROUPS];
    size_t group_count;
    struct {
        int resource;
        struct rlimit limit;
    } rlimits[MAX_RLIMITS];
    size_t rlimit_count;
    int fds[4]; /* stdin, stdout, stderr, status; -1: none. The supervisor has copies of its own */
    bool closed;
    bool pty;
    bool tell_started;
    void *stack;
    size_t stack_size;
};

struct process;

struct channel {
    struct source source;
    struct process *process;
    unsigned index;
    uint8_t *bytes;
    size_t capacity, most;
    uint64_t start, end; /* absolute offsets of what is kept */
    uint64_t sent;       /* up to here it was given to the attached stream */
    uint64_t final;      /* END_n, once known */
    uint64_t drain_to;   /* what was in the pipe when the process exited */
};

struct process {
    struct process *next, **link;
    uint8_t id[MAX_ID];
    size_t id_length;
    unsigned flags;
    struct launch launch;
    struct channel channels[CHANNELS];
    struct source input;
    uint8_t *input_bytes;
    size_t input_start, input_end, input_capacity;
    bool input_ended;
    struct stream *stream;
    struct stream *killers[8]; /* KILL requests that wait for the end of the tree */
    unsigned killer_count;
    uint64_t started_ns, ended_ns;
    uint64_t grace_ns;
    struct timer deadline, kill_again, settle;
    unsigned kill_rounds;
    unsigned cause;

    /* Written by the supervisor, read after its notice. */
    volatile pid_t supervisor, pid;
    volatile int stage, error, status;
    volatile uint64_t cpu_ns, max_rss_bytes;
    volatile bool ended; /* the process itself; `status` holds */

    bool exited;   /* the process itself, and we know it */
    bool gone;     /* it and all that it started */
    bool killing;  /* its whole tree is being killed */
    bool told_started, dropped;
    bool complete; /* exited, and all it wrote before is in the channels: `final` holds */
};

int supervise_init(int notice_fd);
int supervise(struct process *process);
/* Kill what descends from the supervisor, except `spare`. True: there was something. */
bool kill_descendants(pid_t supervisor, pid_t spare);
/* Kill what has become our own child although it is nobody's supervisor: orphans of a supervisor that was killed. */
void kill_strays(bool (*is_supervisor)(pid_t pid));

int launch_prepare(struct launch *launch, struct fields fields);
void launch_close(struct launch *launch); /* our copies of the descriptors; their numbers stay for the supervisor to read */
void launch_release(struct launch *launch);

#endif

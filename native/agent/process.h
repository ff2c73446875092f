/* A command that was started, as the files that process.c names see it. */
#ifndef ATOLL_PROCESS_H
#define ATOLL_PROCESS_H

#include "agent.h"

#include <sys/resource.h>

enum { CHUNK = 64 * 1024, CHANNELS = 3, MAX_RLIMITS = 32, MAX_GROUPS = 64 };

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
    int fds[4]; /* stdin (-1: nothing to read), stdout, stderr, status (-1: none). The supervisor has copies of its own */
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
    uint64_t said_before[2]; /* output that the last status read speaks of: it goes out first */
    struct source input;
    uint8_t *input_bytes;
    size_t input_start, input_end, input_capacity;
    size_t input_owed; /* of the bytes waiting, those that the attached stream sent and gets credit for */
    bool input_ended;
    struct stream *stream;
    struct stream *killers[8]; /* KILL requests that wait for the end of the tree */
    unsigned killer_count;
    uint64_t started_ns, ended_ns;
    uint64_t grace_ns;
    struct timer deadline, kill_again, settle;
    uint64_t kill_ns; /* since when all of it is being killed */
    bool evades;      /* it does what it can to stay alive */
    unsigned cause;

    /* Written by the supervisor, read after its notice. */
    volatile pid_t supervisor, pid;
    volatile int stage, error, status;
    volatile uint64_t cpu_ns, max_rss_bytes;
    volatile bool ended; /* the process itself; `status` holds */

    bool lost;     /* its supervisor was killed: all below it came to us and is being killed */
    bool exited;   /* the process itself, and we know it */
    bool gone;     /* it and all that it started */
    bool killing;  /* its whole tree is being killed */
    bool told_started, dropped;
    bool complete; /* exited, and all it wrote before is in the channels: `final` holds */
};

#define OWNER(pointer, member) ((struct process *)((char *)(pointer)-offsetof(struct process, member)))
#define URGENT_NS (30ull * MS)     /* most trees are gone long before */
#define PATIENCE_NS (3000ull * MS)  /* with a supervisor whose children do not go, though they do not evade us either */
#define GIVE_UP_NS (10000ull * MS) /* what hangs in the kernel cannot be killed, and the host gets its answer */

/* process.c */
extern struct process *processes;
struct process *find_process(struct fields fields);
void drop_if_forgotten(struct process *process);

/* stdio.c */
int open_streams(struct process *process, struct fields fields);
void resize_terminal(struct process *process, struct fields fields);

/* process_stream.c */
extern const struct stream_ops process_ops;
void attach(struct process *process, struct stream *stream, struct fields fields);
void input_ready(struct source *source, uint32_t events);

/* completion.c */
void channel_ready(struct source *source, uint32_t events);
void listen_again(struct process *process);
void check_complete(struct process *process);
void settle_fire(struct timer *timer);
void process_gone(struct process *process); /* it and all that it started */
void notices_ready(struct source *source, uint32_t events);

/* termination.c */
void start_kill(struct process *process, unsigned cause);
int send_signal(struct process *process, uint64_t number, bool spare);
void kill_again_fire(struct timer *timer);
void deadline_fire(struct timer *timer);

int supervise(struct process *process);

/* kill(2), which refuses numbers that would hit more than one process or one group, or ourselves. */
int signal_process(pid_t pid, int number);
int signal_group(pid_t group, int number);

struct outcome {
    size_t present;  /* at the last look: dying, dead and not yet waited for, or just born */
    unsigned passes; /* how often we looked */
    bool evaded;     /* some came into being while we looked */
};

/* Kill what descends from `root`, except `spare`, and except children that are passed over with all that is below them (may be
 * NULL). Takes a few milliseconds at most; it is over only when a later call finds nothing present. */
struct outcome kill_below(pid_t root, pid_t spare, bool (*passed_over)(pid_t pid), bool urgent);
void calm_down(void); /* after something urgent */

/* Up to `most` bytes from the pipe. Positive: read; 0: end of file; -1: nothing there now; -2: no room. */
ssize_t channel_fill(struct channel *channel, size_t most);
/* All that is in the pipe now. The last result of `channel_fill`; with -2 and `end` below `drain_to` some is left. */
ssize_t channel_drain(struct channel *channel);
void channel_say(struct channel *channel, const char *text);            /* words of our own, as far as there is room */
bool channel_pump(struct channel *channel, struct stream *stream);      /* one DATA frame, if there is something */

int launch_prepare(struct launch *launch, struct fields fields);
void launch_close(struct launch *launch); /* our copies of the descriptors; their numbers stay for the supervisor to read */
void launch_release(struct launch *launch);

#endif

/* A command that was started: the declarations shared by the files that process.c lists. */
#ifndef ATOLL_PROCESS_H
#define ATOLL_PROCESS_H

#include "agent.h"

#include <sys/resource.h>

enum { CHUNK = 64 * 1024, CHANNELS = 3, MAX_RLIMITS = 32, MAX_GROUPS = 64 };

enum stage { STAGE_NONE, STAGE_SETUP, STAGE_CWD, STAGE_USER, STAGE_EXEC };

/* Everything that the new process needs, prepared before it is cloned, because it shares the agent's memory and may not allocate. */
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
    int fds[4]; /* stdin (-1: nothing to read), stdout, stderr, status (-1: none). The supervisor has its own copies */
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
    uint64_t start, end; /* absolute offsets of the kept output */
    uint64_t sent;       /* offset up to which output was sent to the attached stream */
    uint64_t final;      /* END_n, once known */
    uint64_t drain_to;   /* offset of the end of the data that was in the pipe when the process exited */
};

/* How a process is started again after its end. See restart.c. */
struct restart {
    unsigned policy;
    uint8_t *bytes; /* a copy of the fields of its START */
    size_t length;
    unsigned count;    /* how often it was started again */
    unsigned failures; /* how often in a row it ended soon after its start */
    unsigned last_cause, last_status;
    bool pending; /* the process itself has ended, and will be started again */
    bool waiting; /* all that it left running has ended too: the timer is set */
    struct timer timer;
};

struct process {
    struct process *next, **link;
    uint8_t id[MAX_ID];
    size_t id_length;
    unsigned flags;
    struct launch launch;
    struct channel channels[CHANNELS];
    uint64_t said_before[2]; /* ends of the output that was written before the last status: it is sent first */
    struct source input;
    uint8_t *input_bytes;
    size_t input_start, input_end, input_capacity;
    size_t input_owed; /* of the waiting bytes, those for which the attached stream gets credit */
    bool input_ended;
    struct stream *stream;
    struct caller *caller; /* of a command by sudo: who waits for it. NULL: nobody */
    bool by_sudo;
    struct stream *killers[8]; /* KILL requests that wait for the end of the tree */
    unsigned killer_count;
    uint64_t started_ns, ended_ns;
    uint64_t grace_ns;
    struct timer deadline, kill_again, settle;
    uint64_t kill_ns; /* when killing the tree began */
    bool evades;      /* the tree evades being killed */
    unsigned cause;
    struct restart restart;

    /* Written by the supervisor, read after its notice. */
    volatile pid_t supervisor, pid;
    volatile int stage, error, status;
    volatile uint64_t cpu_ns, max_rss_bytes;
    volatile bool ended; /* the process itself has ended; `status` is valid */

    bool lost;     /* its supervisor was killed: all its descendants are now the agent's children and are being killed */
    bool exited;   /* the process itself has ended, and the agent knows it */
    bool gone;     /* it and everything that it started have ended */
    bool killing;  /* its whole tree is being killed */
    bool told_started, dropped;
    bool complete; /* exited, and all earlier output is in the channels; `final` is valid */
};

#define OWNER(pointer, member) ((struct process *)((char *)(pointer)-offsetof(struct process, member)))
#define URGENT_NS (30ull * MS)     /* most trees are gone much earlier */
#define PATIENCE_NS (3000ull * MS)  /* for a supervisor whose children neither end nor evade */
#define GIVE_UP_NS (10000ull * MS) /* a process that hangs in the kernel cannot be killed; the host gets its answer after this time */

/* process.c */
extern struct process *processes;
extern unsigned process_count;
struct process *process_without_id(void); /* NULL: too many, or no memory */
void process_drop(struct process *process);
int process_begin(struct process *process, struct fields fields);
struct process *find_process(struct fields fields);
void drop_if_forgotten(struct process *process);

/* restart.c */
int restart_prepare(struct process *process, struct fields fields);
bool restart_follows(const struct process *process); /* the process itself has just ended: will it be started again? */
void restart_begin(struct process *process);         /* end what it left running, and start it again then */
void restart_later(struct process *process);         /* everything that it started has ended */
bool restart_cancel(struct process *process);        /* start it no more. Returns true if nothing of it was running */
void restart_release(struct process *process);

/* sudo.c */
void sudo_ended(struct process *process); /* the process itself has ended */
void sudo_dropped(void);

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
void process_gone(struct process *process); /* it and everything that it started have ended */
void notices_ready(struct source *source, uint32_t events);

/* termination.c */
void start_kill(struct process *process, unsigned cause);
int send_signal(struct process *process, uint64_t number, bool spare);
void kill_again_fire(struct timer *timer);
void deadline_fire(struct timer *timer);

int supervise(struct process *process);

/* Like kill(2), but these refuse numbers that mean more than one process or one group, or the agent itself. */
int signal_process(pid_t pid, int number);
int signal_group(pid_t group, int number);

struct outcome {
    size_t present;  /* in the last pass: dying, dead but not waited for, or just started */
    unsigned passes; /* the number of passes */
    bool evaded;     /* some were started during the passes */
};

/* Kill the descendants of `root`, except `spare`, and except children for which `passed_over` (may be NULL) returns true, with their
 * descendants. This takes a few milliseconds at most; the tree is dead only when a later call finds nothing present. */
struct outcome kill_below(pid_t root, pid_t spare, bool (*passed_over)(pid_t pid), bool urgent);
void calm_down(void); /* end the raised priority of an urgent kill */

/* Read up to `most` bytes from the pipe. Positive: bytes read; 0: end of file; -1: no data now; -2: no room. */
ssize_t channel_fill(struct channel *channel, size_t most);
/* Read everything that is in the pipe now. Returns the last result of `channel_fill`; if -2 and `end` < `drain_to`, some is left. */
ssize_t channel_drain(struct channel *channel);
void channel_say(struct channel *channel, const char *text);            /* add a text of the agent, as far as there is room */
bool channel_pump(struct channel *channel, struct stream *stream);      /* send one DATA frame, if there is output */

bool account_uid(const char *name, uid_t *uid); /* the uid of an account inside */
int launch_prepare(struct launch *launch, struct fields fields);
void launch_close(struct launch *launch); /* close the agent's copies; their numbers stay for the supervisor to read */
void launch_release(struct launch *launch);

#endif

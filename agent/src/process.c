/* Processes: started, fed, listened to, and remembered until they are released.
 *
 * A process is complete when it has exited and all that was in its pipes at that moment is in the rings. If its tree is
 * being killed, it is complete only when the tree is gone, so that an answer means what it says.
 */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <sched.h>
#include <termios.h>
#include <unistd.h>

enum {
    DEFAULT_KEEP = 1 << 20,
    MOST_KEEP = 64 << 20,
    MOST_REAPED = 256, /* in one turn */
    MOST_INPUT = 4 << 20, /* streams that attach one after another each bring credit for more */
};
#define URGENT_NS (30ull * MS)     /* most trees are gone long before */
#define PATIENCE_NS (3000ull * MS)  /* with a supervisor whose children do not go, though they do not evade us either */
#define GIVE_UP_NS (10000ull * MS) /* what hangs in the kernel cannot be killed, and the host gets its answer */
#ifndef TIOCGPTPEER
#define TIOCGPTPEER 0x5441
#endif

static struct process *processes;
static unsigned process_count;
static struct source notices, children;
static const struct stream_ops process_ops, killer_ops;

#define OWNER(pointer, member) ((struct process *)((char *)(pointer)-offsetof(struct process, member)))

static struct process *find_process(struct fields fields)
{
    struct field id;
    if (!fields_find(fields, TAG_ID, &id) || !id.length || id.length > MAX_ID)
        return NULL;
    for (struct process *process = processes; process; process = process->next)
        if (process->id_length == id.length && memcmp(process->id, id.value, id.length) == 0)
            return process;
    return NULL;
}

static void drop(struct process *process)
{
    if (process->dropped)
        return;
    process->dropped = true;
    *process->link = process->next;
    if (process->next)
        process->next->link = process->link;
    process_count--;
    for (int i = 0; i < CHANNELS; i++) {
        source_close(&process->channels[i].source);
        free(process->channels[i].bytes);
    }
    source_close(&process->input);
    free(process->input_bytes);
    timer_set(&process->deadline, 0);
    timer_set(&process->kill_again, 0);
    timer_set(&process->settle, 0);
    launch_release(&process->launch);
    free_later(process);
}

static void drop_if_forgotten(struct process *process)
{
    if (process->gone && process->complete && !process->stream && process->flags & START_FORGET)
        drop(process);
}

/* --- output coming in --------------------------------------------------------------------------------------------------- */

static void check_complete(struct process *process);

/* A status speaks of the output before it: that must be in first. False: there is no room for it yet. */
static bool take_output_before_status(struct process *process)
{
    for (int i = 0; i < 2; i++) {
        struct channel *channel = &process->channels[i];
        if (channel_drain(channel) == 0)
            source_close(&channel->source);
        if (channel->source.fd >= 0 && channel->end < channel->drain_to)
            return false;
        process->said_before[i] = channel->end;
    }
    return true;
}

static void channel_ready(struct source *source, uint32_t events)
{
    struct channel *channel = (struct channel *)((char *)source - offsetof(struct channel, source));
    struct process *process = channel->process;
    (void)events;
    bool wait = channel->index == 2 && !process->complete && !take_output_before_status(process);
    ssize_t got = wait ? -2 : channel_fill(channel, CHUNK);
    if (got == 0)
        source_close(source);
    else if (got == -2)
        source_watch(source, 0); /* the stream's pump will ask again */
    if (process->stream)
        stream_wake(process->stream);
    check_complete(process);
}

static void listen_again(struct process *process)
{
    for (int i = 0; i < CHANNELS; i++)
        if (process->channels[i].source.fd >= 0)
            source_watch(&process->channels[i].source, EPOLLIN);
}

/* --- the end of a process ------------------------------------------------------------------------------------------------ */

static void check_complete(struct process *process)
{
    if (!process->exited || process->complete || (process->killing && !process->gone && now_ns() - process->kill_ns < GIVE_UP_NS))
        return;
    for (int i = 0; i < CHANNELS; i++) {
        struct channel *channel = &process->channels[i];
        if (channel->source.fd >= 0 && (channel->end < channel->drain_to || process->settle.due_ns))
            return;
    }
    process->complete = true;
    for (int i = 0; i < CHANNELS; i++)
        process->channels[i].final = process->channels[i].end;
    timer_set(&process->settle, 0);
    if (process->stream)
        stream_wake(process->stream);
    else
        drop_if_forgotten(process);
}

static void settle_fire(struct timer *timer)
{
    check_complete(OWNER(timer, settle));
}

/* Note what is still in the pipes and take it. */
static void settle(struct process *process)
{
    for (int i = 0; i < CHANNELS; i++) {
        struct channel *channel = &process->channels[i];
        if (channel->source.fd < 0)
            continue;
        if (process->flags & START_PTY) /* a terminal hands over a little later what was written to it */
            timer_set(&process->settle, now_ns() + 100 * MS);
        if (channel_drain(channel) == 0)
            source_close(&channel->source);
    }
    check_complete(process);
}

static void start_kill(struct process *process, unsigned cause);

static void process_exited(struct process *process)
{
    process->exited = true;
    process->ended_ns = now_ns();
    timer_set(&process->deadline, 0);
    source_close(&process->input);
    if (process->stage == STAGE_EXEC) {
        char text[PATH_MAX + 64];
        bool missing = process->error == ENOENT;
        snprintf(text, sizeof text, "atoll: %.4000s: %s\n", process->launch.argv[0], missing ? "not found" : strerror(process->error));
        channel_say(&process->channels[process->flags & (START_MERGE | START_PTY) ? 0 : 1], text);
        process->status = (missing ? 127 : 126) << 8;
    } else if (process->stage != STAGE_NONE) {
        process->flags |= START_FORGET;
        process->complete = true;
        process->id_length = 0; /* it never was: the same ID may be tried again at once */
        struct stream *stream = process->stream;
        const char *what = process->stage == STAGE_CWD    ? process->launch.cwd
                           : process->stage == STAGE_USER ? "cannot become that user"
                                                          : "cannot start a process";
        if (stream)
            stream_fail(stream, process->error, what);
        return;
    }
    if (process->cause)
        start_kill(process, process->cause); /* the deadline was over: nothing may stay */
    else
        process->cause = WIFSIGNALED(process->status) ? CAUSE_SIGNAL : CAUSE_EXIT;
    settle(process);
}

static void process_gone(struct process *process)
{
    process->gone = true;
    timer_set(&process->kill_again, 0);
    calm_down();
    if (!process->exited) { /* something inside killed the supervisor */
        if (!process->cause)
            process->cause = CAUSE_LOST;
        process->status = SIGKILL;
        process_exited(process);
    } else if (process->killing && !process->complete) {
        settle(process);
    }
    while (process->killer_count)
        stream_finish(process->killers[0], NULL);
    launch_release(&process->launch);
    drop_if_forgotten(process);
}

static void tell_started(struct process *process)
{
    struct builder fields;
    fields.length = 0;
    process->told_started = true;
    if (!process->stream)
        return;
    add_number(&fields, TAG_PID, (uint64_t)process->pid);
    stream_event(process->stream, EVENT_STARTED, &fields);
    if (process->flags & START_DETACH)
        stream_finish(process->stream, NULL);
}

static void take_notice(struct process *process)
{
    if (process->flags & START_STARTED && !process->told_started && process->stage == STAGE_NONE)
        tell_started(process);
    if (process->ended && !process->exited)
        process_exited(process);
}

static void notices_ready(struct source *source, uint32_t events)
{
    struct process *noticed[64];
    ssize_t length;
    (void)events;
    do {
        length = read(source->fd, noticed, sizeof noticed);
        for (ssize_t i = 0; i < length / (ssize_t)sizeof *noticed; i++)
            take_notice(noticed[i]);
    } while (length == sizeof noticed);
}

static bool is_supervisor(pid_t pid)
{
    for (struct process *process = processes; process; process = process->next)
        if (process->supervisor == pid && !process->gone && !process->lost)
            return true;
    return false;
}

static bool reap(void);
static void sweep(struct timer *timer);
static struct timer sweeping = {.fire = sweep};

/* Below us is nothing but supervisors. Anything else came from one that was killed, and goes; until it has gone, the process that it
 * belonged to has not ended. */
static void sweep(struct timer *timer)
{
    static bool urgent;
    static uint64_t since_ns; /* when there was nothing */
    reap(); /* before: what comes to us from a supervisor that was killed must be seen below */
    struct outcome outcome = kill_below(getpid(), 0, is_supervisor, urgent);
    uint64_t now = now_ns();
    if (!outcome.present || !since_ns)
        since_ns = now;
    urgent = outcome.evaded || (outcome.present && now - since_ns > URGENT_NS);
    for (struct process *process = processes, *next; process; process = next) {
        next = process->next;
        if (!process->lost || process->gone)
            continue;
        if (!outcome.present || now - process->kill_ns >= GIVE_UP_NS)
            process_gone(process);
    }
    if (outcome.present)
        timer_set(timer, outcome.evaded ? now : now + (now - since_ns < PATIENCE_NS ? 1 : 100) * MS);
    else
        calm_down();
}

static void supervisor_ended(struct process *process, bool killed)
{
    if (!process->exited)
        notices_ready(&notices, 0); /* it gives notice before it ends */
    if (!killed) {
        process_gone(process);
        return;
    }
    process->lost = true;
    if (!process->killing)
        process->kill_ns = now_ns();
}

/* Wait for what has ended. True: there were some that came to us from a supervisor, or may come now. */
static bool reap(void)
{
    bool strays = false;
    int status;
    pid_t pid;
    int count = 0;
    while (count++ < MOST_REAPED && (pid = waitpid(-1, &status, WNOHANG | WUNTRACED | __WALL)) > 0) {
        struct process *process = processes;
        if (WIFSTOPPED(status)) {
            signal_process(pid, SIGCONT); /* a supervisor that was stopped would see nothing */
            continue;
        }
        while (process && (process->supervisor != pid || process->gone || process->lost))
            process = process->next;
        strays |= !process || WIFSIGNALED(status);
        if (process)
            supervisor_ended(process, WIFSIGNALED(status));
    }
    if (count > MOST_REAPED) /* killing is more urgent than burying */
        timer_set(&sweeping, now_ns());
    return strays;
}

static void children_ready(struct source *source, uint32_t events)
{
    struct signalfd_siginfo info;
    (void)events;
    if (read(source->fd, &info, sizeof info) >= 0 && reap())
        sweep(&sweeping);
}

/* --- killing --------------------------------------------------------------------------------------------------------------- */

static void kill_round(struct process *process)
{
    if (process->gone || process->lost)
        return;
    signal_process(process->supervisor, SIGCONT);
    bool urgent = process->evades || now_ns() - process->kill_ns > URGENT_NS;
    struct outcome outcome = kill_below(process->supervisor, 0, NULL, urgent);
    process->evades |= outcome.evaded;
    uint64_t now = now_ns(), since = now - process->kill_ns;
    /* Then what is below the supervisor comes to us, and we wait for the dead ourselves: where very many processes want to run the
     * supervisor hardly does. See sweep. */
    if (since > PATIENCE_NS || (outcome.evaded && since > 100 * MS))
        signal_process(process->supervisor, SIGKILL);
    if (since > GIVE_UP_NS)
        check_complete(process);
    timer_set(&process->kill_again, outcome.evaded ? now : now + (since < 50 * MS ? 1 : since < 1000 * MS ? 5 : 50) * MS);
}

static void kill_again_fire(struct timer *timer) { kill_round(OWNER(timer, kill_again)); }

static void start_kill(struct process *process, unsigned cause)
{
    if (process->gone || process->killing)
        return;
    process->killing = true;
    if (!process->lost)
        process->kill_ns = now_ns();
    if (!process->cause)
        process->cause = cause;
    kill_round(process);
}

/* The process's own number; its supervisor may be about to write it. */
static pid_t own_pid(struct process *process)
{
    for (uint64_t until = now_ns() + 50 * MS; !process->pid && !process->ended && now_ns() < until;)
        sched_yield();
    return process->pid;
}

static void deadline_fire(struct timer *timer)
{
    struct process *process = OWNER(timer, deadline);
    pid_t pid = own_pid(process);
    if (process->ended)
        return;
    if (!process->grace_ns || pid <= 0) {
        start_kill(process, CAUSE_TIMEOUT);
        return;
    }
    process->cause = CAUSE_TIMEOUT;
    signal_group(pid, SIGTERM);
    signal_group(pid, SIGCONT);
    timer_set(timer, now_ns() + process->grace_ns);
    process->grace_ns = 0;
}

static int send_signal(struct process *process, uint64_t number, bool spare)
{
    if (number > 64)
        return EINVAL;
    if (number == SIGKILL && !spare) {
        if (process->gone)
            return ESRCH;
        start_kill(process, CAUSE_KILLED);
        return 0;
    }
    pid_t pid = own_pid(process);
    if (process->gone || process->lost || pid <= 0)
        return ESRCH;
    if (spare) {
        kill_below(process->supervisor, pid, NULL, false);
        return 0;
    }
    return process->ended || signal_group(pid, (int)number) < 0 ? ESRCH : 0;
}

static void killer_closed(struct stream *stream)
{
    struct process *process = stream->owner;
    for (unsigned i = 0; i < process->killer_count; i++)
        if (process->killers[i] == stream)
            process->killers[i] = process->killers[--process->killer_count];
}

static const struct stream_ops killer_ops = {.closed = killer_closed};

void process_kill(struct stream *stream, struct fields fields)
{
    struct process *process = find_process(fields);
    uint64_t number = fields_number_or(fields, TAG_SIGNAL, SIGKILL);
    bool spare = fields_number_or(fields, TAG_FLAGS, 0) & 1;
    if (!process) {
        stream_fail(stream, ENOENT, "no such process");
        return;
    }
    bool waits = number == SIGKILL && !spare;
    if (waits && process->killer_count == sizeof process->killers / sizeof *process->killers) {
        stream_fail(stream, EAGAIN, "it is being killed");
        return;
    }
    int error = send_signal(process, number, spare);
    if (error) {
        stream_fail(stream, error, NULL);
    } else if (!waits || process->gone) {
        stream_finish(stream, NULL);
    } else {
        stream_serve(stream, &killer_ops, process);
        process->killers[process->killer_count++] = stream;
    }
}

void process_release(struct stream *stream, struct fields fields)
{
    struct process *process = find_process(fields);
    if (!process) {
        stream_fail(stream, ENOENT, "no such process");
    } else if (!process->complete) {
        stream_fail(stream, EBUSY, NULL);
    } else {
        process->flags |= START_FORGET; /* what it left running keeps its entry, so that it can be killed, and no longer */
        if (process->stream)
            stream_fail(process->stream, ESTALE, "released");
        drop_if_forgotten(process);
        stream_finish(stream, NULL);
    }
}

/* --- the stream of a process --------------------------------------------------------------------------------------------------- */

static void finish(struct process *process)
{
    struct builder fields;
    fields.length = 0;
    add_number(&fields, TAG_CAUSE, process->cause);
    add_number(&fields, TAG_PID, (uint64_t)process->pid);
    if (WIFSIGNALED(process->status))
        add_number(&fields, TAG_TERM_SIGNAL, (uint64_t)WTERMSIG(process->status));
    else
        add_number(&fields, TAG_EXIT_CODE, (uint64_t)WEXITSTATUS(process->status));
    for (unsigned i = 0; i < CHANNELS; i++)
        add_number(&fields, TAG_END_1 + i, process->channels[i].final);
    add_number(&fields, TAG_DURATION_NS, process->ended_ns - process->started_ns);
    add_number(&fields, TAG_CPU_NS, process->cpu_ns);
    add_number(&fields, TAG_MAX_RSS_BYTES, process->max_rss_bytes);
    stream_finish(process->stream, &fields);
}

static bool process_pump(struct stream *stream)
{
    struct process *process = stream->owner;
    struct channel *channels = process->channels;
    bool sent = channel_pump(&channels[0], stream);
    sent |= channel_pump(&channels[1], stream);
    if (channels[0].sent >= process->said_before[0] && channels[1].sent >= process->said_before[1])
        sent |= channel_pump(&channels[2], stream);
    if (process->complete) {
        bool all = true;
        for (int i = 0; i < CHANNELS; i++)
            all &= channels[i].sent >= channels[i].final;
        if (all) {
            finish(process);
            return false;
        }
    } else if (sent) {
        listen_again(process);
    }
    return sent;
}

/* Bytes of input that wait no more. */
static void input_taken(struct process *process, size_t length)
{
    size_t unowed = process->input_end - process->input_start - process->input_owed; /* those came first */
    size_t owed = length > unowed ? length - unowed : 0;
    process->input_start += length;
    process->input_owed -= owed;
    if (process->stream && owed)
        stream_consumed(process->stream, owed);
}

static void write_input(struct process *process)
{
    while (process->input_start < process->input_end && process->input.fd >= 0) {
        ssize_t (*put)(int, const void *, size_t) = process->flags & START_PTY ? gvisor_write : write;
        ssize_t length = put(process->input.fd, process->input_bytes + process->input_start, process->input_end - process->input_start);
        if (length < 0 && errno == EINTR)
            continue;
        if (length < 0 && errno == EAGAIN)
            break;
        if (length < 0)
            source_close(&process->input);
        else
            input_taken(process, (size_t)length);
    }
    if (process->input.fd < 0) /* nobody reads it: as if written */
        input_taken(process, process->input_end - process->input_start);
    if (process->input_start == process->input_end) {
        process->input_start = process->input_end = 0;
        if (process->input_ended)
            source_close(&process->input);
    }
    if (process->input.fd >= 0)
        source_watch(&process->input, process->input_end ? EPOLLOUT : 0);
}

static void input_ready(struct source *source, uint32_t events)
{
    (void)events;
    write_input(OWNER(source, input));
}

static bool queue_input(struct process *process, const uint8_t *bytes, size_t length)
{
    if (process->input_start) {
        memmove(process->input_bytes, process->input_bytes + process->input_start, process->input_end - process->input_start);
        process->input_end -= process->input_start;
        process->input_start = 0;
    }
    if (process->input_end + length > MOST_INPUT)
        return false;
    if (process->input_capacity - process->input_end < length) {
        size_t capacity = process->input_end + length + 4096;
        uint8_t *larger = realloc(process->input_bytes, capacity);
        if (!larger)
            return false;
        process->input_bytes = larger;
        process->input_capacity = capacity;
    }
    memcpy(process->input_bytes + process->input_end, bytes, length);
    process->input_end += length;
    return true;
}

static void process_data(struct stream *stream, const uint8_t *bytes, size_t length)
{
    struct process *process = stream->owner;
    if (process->input.fd < 0 || process->input_ended) {
        stream_consumed(stream, length);
    } else if (!queue_input(process, bytes, length)) {
        stream_fail(stream, ENOMEM, "standard input");
    } else {
        process->input_owed += length;
        write_input(process);
    }
}

static void process_end(struct stream *stream)
{
    struct process *process = stream->owner;
    if (process->input.fd < 0)
        return;
    static const uint8_t end_of_file = 4;
    if (process->flags & START_PTY)
        queue_input(process, &end_of_file, 1);
    else
        process->input_ended = true;
    write_input(process);
}

static void resize(struct process *process, struct fields fields)
{
    struct winsize size = {
        .ws_row = (unsigned short)fields_number_or(fields, TAG_ROWS, 24),
        .ws_col = (unsigned short)fields_number_or(fields, TAG_COLS, 80),
    };
    int master = process->flags & START_PTY ? process->channels[0].source.fd : -1;
    if (master >= 0 && ioctl(master, TIOCSWINSZ, &size) == 0)
        gvisor_resized(process->pid);
}

static void process_control(struct stream *stream, unsigned verb, struct fields fields)
{
    if (verb == VERB_RESIZE)
        resize(stream->owner, fields);
    else if (verb == VERB_SIGNAL)
        send_signal(stream->owner, fields_number_or(fields, TAG_SIGNAL, SIGKILL), false);
}

static void process_closed(struct stream *stream)
{
    struct process *process = stream->owner;
    if (process->stream != stream)
        return; /* another has taken over */
    process->stream = NULL;
    process->input_owed = 0;
    listen_again(process); /* from now on old output makes way */
    drop_if_forgotten(process);
}

static const struct stream_ops process_ops = {
    .data = process_data,
    .end = process_end,
    .control = process_control,
    .pump = process_pump,
    .closed = process_closed,
};

static void attach(struct process *process, struct stream *stream, struct fields fields)
{
    struct builder event;
    struct stream *former = process->stream;
    event.length = 0;
    process->stream = stream; /* first, so that a process to be forgotten is not dropped between the two */
    process->input_owed = 0;
    stream_serve(stream, &process_ops, process);
    if (former)
        stream_fail(former, ESTALE, "taken over by another connection");
    add_number(&event, TAG_PID, (uint64_t)process->pid);
    add_number(&event, TAG_RUNNING, !process->complete);
    for (unsigned i = 0; i < CHANNELS; i++) {
        struct channel *channel = &process->channels[i];
        uint64_t end = process->complete ? channel->final : channel->end;
        uint64_t from = fields_number_or(fields, TAG_OFFSET_1 + i, 0);
        if (from < channel->start)
            from = channel->start;
        if (from > end)
            from = end;
        channel->sent = from;
        add_number(&event, TAG_OFFSET_1 + i, from);
    }
    stream_event(stream, EVENT_ATTACHED, &event);
    listen_again(process);
    stream_wake(stream);
}

void process_attach(struct stream *stream, struct fields fields)
{
    struct process *process = find_process(fields);
    if (process)
        attach(process, stream, fields);
    else
        stream_fail(stream, ENOENT, "no such process");
}

/* --- starting ---------------------------------------------------------------------------------------------------------------- */

static int open_slave(int master)
{
    int unlock = 0, number;
    char path[32];
    if (ioctl(master, TIOCSPTLCK, &unlock) < 0)
        return -1;
    int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC); /* whatever is mounted on /dev/pts */
    if (slave >= 0 || ioctl(master, TIOCGPTN, &number) < 0)
        return slave;
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    return open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
}

static int open_pty(struct process *process, struct fields fields)
{
    struct launch *launch = &process->launch;
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0)
        return -1;
    process->channels[0].source.fd = master;
    process->input.fd = fcntl(master, F_DUPFD_CLOEXEC, FIRST_FREE_FD);
    launch->fds[0] = open_slave(master);
    if (launch->fds[0] < 0 || process->input.fd < 0)
        return -1;
    for (int i = 1; i < 3; i++)
        if ((launch->fds[i] = fcntl(launch->fds[0], F_DUPFD_CLOEXEC, FIRST_FREE_FD)) < 0)
            return -1;
    if (launch->change_user && fchown(launch->fds[0], launch->uid, (gid_t)-1) < 0 && errno != EPERM && errno != EROFS)
        return -1; /* a terminal belongs to who sits at it */
    launch->pty = true;
    resize(process, fields);
    return 0;
}

/* A pipe whose `ours` end is ours and does not block. */
static int open_pipe(int *ours, int *theirs, int ours_index)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return -1;
    *ours = fds[ours_index];
    *theirs = fds[!ours_index];
    return fcntl(*ours, F_SETFL, O_NONBLOCK);
}

/* For a shell that reports its status: after a command that died of a signal bash restores the terminal that its own standard error
 * is, and complains in the middle of that command's output if it is none. Without terminals here it is a pipe all the same. */
static int open_error_terminal(int *ours, int *theirs)
{
    struct termios plain;
    *ours = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (*ours >= 0 && (*theirs = open_slave(*ours)) >= 0) {
        if (tcgetattr(*theirs, &plain) == 0) {
            plain.c_oflag &= ~(tcflag_t)OPOST; /* what is written comes out as it is */
            tcsetattr(*theirs, TCSANOW, &plain);
        }
        return 0;
    }
    if (*ours >= 0)
        close(*ours);
    return open_pipe(ours, theirs, 0);
}

static int open_pipes(struct process *process)
{
    int *theirs = process->launch.fds;
    struct channel *channels = process->channels;
    if (process->flags & START_STDIN && open_pipe(&process->input.fd, &theirs[0], 1) < 0)
        return -1;
    if (open_pipe(&channels[0].source.fd, &theirs[1], 0) < 0)
        return -1;
    if (process->flags & START_MERGE) {
        if ((theirs[2] = fcntl(theirs[1], F_DUPFD_CLOEXEC, FIRST_FREE_FD)) < 0)
            return -1;
    } else if (process->flags & START_STATUS) {
        return open_error_terminal(&channels[1].source.fd, &theirs[2]);
    } else if (open_pipe(&channels[1].source.fd, &theirs[2], 0) < 0) {
        return -1;
    }
    return 0;
}

static bool make_place(void)
{
    struct process *oldest = NULL;
    if (process_count < MAX_PROCESSES)
        return true;
    for (struct process *process = processes; process; process = process->next)
        if (process->gone && process->complete && !process->stream)
            oldest = process; /* new ones are put in front */
    if (oldest)
        drop(oldest);
    return oldest;
}

static struct process *new_process(struct fields fields)
{
    struct field id;
    uint64_t keep = fields_number_or(fields, TAG_KEEP, DEFAULT_KEEP);
    struct process *process = calloc(1, sizeof *process);
    if (!process)
        return NULL;
    fields_find(fields, TAG_ID, &id);
    memcpy(process->id, id.value, id.length);
    process->id_length = id.length;
    process->flags = (unsigned)fields_number_or(fields, TAG_FLAGS, 0);
    if (process->flags & START_DETACH)
        process->flags |= START_STARTED;
    process->input = (struct source){.fd = -1, .ready = input_ready};
    for (unsigned i = 0; i < CHANNELS; i++) {
        struct channel *channel = &process->channels[i];
        channel->source = (struct source){.fd = -1, .ready = channel_ready};
        channel->process = process;
        channel->index = i;
        channel->most = (keep > MOST_KEEP ? MOST_KEEP : (size_t)keep) + CHUNK;
    }
    process->deadline.fire = deadline_fire;
    process->kill_again.fire = kill_again_fire;
    process->settle.fire = settle_fire;
    process->next = processes;
    process->link = &processes;
    if (processes)
        processes->link = &process->next;
    processes = process;
    process_count++;
    return process;
}

static int start(struct process *process, struct fields fields)
{
    if (launch_prepare(&process->launch, fields) < 0)
        return -1;
    if ((process->flags & START_PTY ? open_pty(process, fields) : open_pipes(process)) < 0)
        return -1;
    if (process->flags & START_STATUS && open_pipe(&process->channels[2].source.fd, &process->launch.fds[3], 0) < 0)
        return -1;
    process->launch.tell_started = process->flags & START_STARTED;
    process->started_ns = now_ns();
    calm_down();
    if (supervise(process) < 0)
        return -1;
    launch_close(&process->launch);
    uint64_t deadline_ms = fields_number_or(fields, TAG_DEADLINE_MS, 0);
    process->grace_ns = fields_number_or(fields, TAG_GRACE_MS, 0) % 86400000 * MS;
    if (deadline_ms)
        timer_set(&process->deadline, process->started_ns + (deadline_ms > 1000000000000 ? 1000000000000 : deadline_ms) * MS);
    listen_again(process);
    return 0;
}

void process_start(struct stream *stream, struct fields fields)
{
    struct field id;
    struct process *process = find_process(fields);
    if (process) {
        attach(process, stream, (struct fields){NULL, 0});
        return;
    }
    if (!fields_find(fields, TAG_ID, &id) || !id.length || id.length > MAX_ID) {
        stream_fail(stream, EINVAL, "a process needs an ID");
        return;
    }
    process = make_place() ? new_process(fields) : NULL;
    if (!process) {
        stream_fail(stream, EAGAIN, "too many processes");
        return;
    }
    if (start(process, fields) < 0) {
        int error = errno;
        drop(process);
        stream_fail(stream, error, "cannot start a process");
        return;
    }
    process->stream = stream;
    stream_serve(stream, &process_ops, process);
}

/* --- listing -------------------------------------------------------------------------------------------------------------------- */

struct listing {
    size_t length, sent;
    uint8_t bytes[];
};

static bool listing_pump(struct stream *stream)
{
    struct listing *listing = stream->owner;
    size_t room;
    if (listing->sent == listing->length) {
        struct builder fields;
        fields.length = 0;
        add_number(&fields, TAG_CAPACITY, MAX_PROCESSES);
        stream_finish(stream, &fields);
        return false;
    }
    uint8_t *payload = stream_reserve(stream, listing->length - listing->sent < CHUNK ? listing->length - listing->sent : CHUNK, &room);
    if (!payload)
        return false;
    memcpy(payload, listing->bytes + listing->sent, room);
    stream_commit(stream, 0, room);
    listing->sent += room;
    return true;
}

static void listing_closed(struct stream *stream) { free(stream->owner); }

void process_list(struct stream *stream)
{
    static const struct stream_ops ops = {.pump = listing_pump, .closed = listing_closed};
    struct listing *listing = calloc(1, sizeof *listing + process_count * (size_t)(MAX_ID + 19));
    if (!listing) {
        stream_fail(stream, ENOMEM, NULL);
        return;
    }
    for (struct process *process = processes; process; process = process->next) {
        if (!process->id_length)
            continue;
        uint8_t *at = listing->bytes + listing->length;
        put_u16(at, (unsigned)process->id_length);
        memcpy(at + 2, process->id, process->id_length);
        at += 2 + process->id_length;
        put_u64(at, (uint64_t)process->pid);
        at[8] = !process->complete;
        put_u64(at + 9, now_ns() - process->started_ns);
        listing->length += 2 + process->id_length + 17;
    }
    stream_serve(stream, &ops, listing);
    stream_wake(stream);
}

void processes_init(void)
{
    int fds[2];
    sigset_t mask;
    if (pipe2(fds, O_CLOEXEC) < 0 || dup3(fds[1], NOTICE_FD, O_CLOEXEC) < 0)
        _exit(73);
    close(fds[1]);
    fcntl(fds[0], F_SETFL, O_NONBLOCK); /* a supervisor may wait, we may not */
    notices = (struct source){.fd = fds[0], .ready = notices_ready};
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    children = (struct source){.fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK), .ready = children_ready};
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (source_watch(&notices, EPOLLIN) < 0 || source_watch(&children, EPOLLIN) < 0)
        _exit(74);
}

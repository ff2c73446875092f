/* The declarations that the parts of the agent share: the loop, fields, connections and streams. */
#ifndef ATOLL_AGENT_H
#define ATOLL_AGENT_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "protocol.h"

/* --- loop.c: one epoll loop; everything else is called from it ------------------------------------------------ */

struct source {
    int fd;
    uint32_t events; /* the events registered with epoll; 0: not registered */
    void (*ready)(struct source *source, uint32_t events);
};

#define MS 1000000u /* in nanoseconds */

struct timer {
    uint64_t due_ns; /* 0: not set */
    void (*fire)(struct timer *timer);
    struct timer *next, **link;
};

uint64_t now_ns(void);
void loop_init(void);
void loop_run(void);
int source_watch(struct source *source, uint32_t events); /* 0 stops watching */
void source_close(struct source *source);                  /* stops watching and closes the descriptor */
void timer_set(struct timer *timer, uint64_t due_ns);      /* 0 clears it */
void free_later(void *memory);                             /* at the end of this turn of the loop: pending events may still refer to it */

/* --- fields.c -------------------------------------------------------------------------------------------------- */

struct fields {
    const uint8_t *bytes;
    size_t length;
};

struct field {
    unsigned tag;
    const uint8_t *value;
    size_t length;
};

bool fields_valid(struct fields fields);
bool fields_next(struct fields *rest, struct field *field);
bool fields_find(struct fields fields, unsigned tag, struct field *field);
bool fields_number(struct fields fields, unsigned tag, uint64_t *number);      /* false: absent */
uint64_t fields_number_or(struct fields fields, unsigned tag, uint64_t otherwise);
/* A copy with a final NUL, or NULL with errno: ENOENT (absent), EINVAL (NUL inside, too long), ENOMEM. */
char *fields_text(struct fields fields, unsigned tag, size_t most);
/* PATH made absolute with CWD or the work directory, in a buffer of PATH_MAX. */
int fields_path(struct fields fields, unsigned tag, char *path);

struct builder {
    uint8_t bytes[1024 + 2 * PATH_MAX];
    size_t length;
};

void add_bytes(struct builder *builder, unsigned tag, const void *value, size_t length);
void add_number(struct builder *builder, unsigned tag, uint64_t number);

static inline void put_u16(uint8_t *at, unsigned value) { at[0] = (uint8_t)value; at[1] = (uint8_t)(value >> 8); }
static inline void put_u32(uint8_t *at, uint32_t value) { put_u16(at, value & 0xffff); put_u16(at + 2, value >> 16); }
static inline void put_u64(uint8_t *at, uint64_t value) { put_u32(at, (uint32_t)value); put_u32(at + 4, (uint32_t)(value >> 32)); }
static inline unsigned get_u16(const uint8_t *at) { return at[0] | (unsigned)at[1] << 8; }
static inline uint32_t get_u32(const uint8_t *at) { return get_u16(at) | (uint32_t)get_u16(at + 2) << 16; }
static inline uint64_t get_u64(const uint8_t *at) { return get_u32(at) | (uint64_t)get_u32(at + 4) << 32; }

/* --- connection.c, stream.c, listener.c: frames, credit, new ones ------------------------------------------------------------ */

struct connection;
struct stream;

/* What an operation does with its stream. All but `closed` may be NULL. */
struct stream_ops {
    void (*data)(struct stream *stream, const uint8_t *bytes, size_t length);
    void (*end)(struct stream *stream);
    void (*control)(struct stream *stream, unsigned verb, struct fields fields);
    /* Produce one frame of output. Returns true if there is more to produce immediately. */
    bool (*pump)(struct stream *stream);
    /* The stream has ended, for any reason: release `owner`. Called exactly once. */
    void (*closed)(struct stream *stream);
};

struct stream {
    struct connection *connection;
    uint32_t number;
    const struct stream_ops *ops;
    void *owner;
    uint64_t credit;   /* bytes of DATA that we may send */
    uint64_t granted;  /* bytes of DATA that the host may send */
    uint64_t consumed; /* of those, processed and not yet granted again */
    bool ended_by_host;
    struct stream *hash_next;
    struct stream *ready_next;
    bool is_ready;
};

void connections_listen(int fd);
void connection_over(int in, int out); /* serve one until its end; over fifos, then serve further ones when data arrives */
void connections_flush(void); /* at the end of each turn of the loop */
unsigned connections_count(void);
unsigned streams_count(void);

void stream_serve(struct stream *stream, const struct stream_ops *ops, void *owner);
void stream_wake(struct stream *stream); /* there may be output to pump */
void stream_consumed(struct stream *stream, size_t length);
void stream_grant(struct stream *stream, uint32_t more);
/* Return room for a DATA payload of up to `most` bytes within the credit, or NULL. Commit the length that was filled, which may be 0. */
uint8_t *stream_reserve(struct stream *stream, size_t most, size_t *room);
void stream_commit(struct stream *stream, unsigned channel, size_t length);
void stream_event(struct stream *stream, unsigned kind, const struct builder *fields);
void stream_finish(struct stream *stream, const struct builder *fields); /* END; the stream is gone afterwards */
void stream_fail(struct stream *stream, int error, const char *what);    /* ERROR; the stream is gone afterwards */

/* --- the operations ------------------------------------------------------------------------------------------------ */

void operation_open(struct stream *stream, unsigned operation, struct fields fields); /* main.c */

void reaper_init(void);
void process_start(struct stream *stream, struct fields fields);
void process_attach(struct stream *stream, struct fields fields);
void process_list(struct stream *stream);
void process_restarts(struct stream *stream);
void sudo_allow(struct stream *stream, struct fields fields);
void process_kill(struct stream *stream, struct fields fields);
void process_release(struct stream *stream, struct fields fields);
uint64_t processes_output_bytes(void);

void file_simple(struct stream *stream, unsigned operation, struct fields fields);
void file_read(struct stream *stream, struct fields fields);
void file_write(struct stream *stream, struct fields fields);
void file_remove(struct stream *stream, struct fields fields);
int make_parents(char *path);
struct stat;
int open_regular(const char *path, int flags, struct stat *info); /* never blocks, and does not open what is not a regular file */
unsigned kind_of(mode_t mode);
int64_t mtime_of(const struct stat *info);
/* Open the directory named by the first `length` bytes of a relative path, following no link. Empty: duplicate `root`. */
int open_folder(int root, const char *path, size_t length);

void tree_walk(struct stream *stream, unsigned operation, struct fields fields);
void tree_put(struct stream *stream, struct fields fields);
void watch_open(struct stream *stream, struct fields fields);

void gvisor_init(void);
void gvisor_resized(pid_t session);
ssize_t gvisor_write(int master, const void *bytes, size_t length);

void port_open(struct stream *stream, struct fields fields);

/* --- main.c ---------------------------------------------------------------------------------------------------------- */

/* Descriptors with a fixed number. Those that a command inherits get low numbers. So the agent keeps all numbers below
 * FIRST_FREE_FD in use, with /dev/null if necessary, and its own descriptors are never in the way. */
enum { NULL_FD = 3, STATUS_FD = 9 /* inside a command */, NOTICE_FD = 10, FIRST_FREE_FD = 16 };

struct agent {
    char work_dir[PATH_MAX];
    uint8_t instance[16];
    uint64_t started_ns;
    bool raised_open_files; /* commands get `open_files` back */
    struct rlimit open_files;
};
extern struct agent agent;

void die(const char *what);

/* --- fresh.c ----------------------------------------------------------------------------------------------------------- */

void leave_session(void);
void own_files(const char *base);

#endif

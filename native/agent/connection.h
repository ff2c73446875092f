/* A connection: the declarations shared by connection.c, stream.c and listener.c. */
#ifndef ATOLL_CONNECTION_H
#define ATOLL_CONNECTION_H

#include "agent.h"

enum { BUCKETS = 64 };

struct connection {
    struct source in, out; /* the same descriptor for a socket */
    uint8_t *in_bytes;
    size_t in_start, in_end;
    uint8_t *out_bytes;
    size_t out_start, out_end, out_capacity;
    uint32_t last_number;
    uint32_t data_left; /* bytes left of a DATA frame whose header was read */
    uint32_t data_number;
    unsigned stream_count;
    struct stream *buckets[BUCKETS];
    struct stream *ready_first, **ready_last;
    struct connection *dirty_next; /* next connection with output to flush at the end of this turn */
    struct timer trim;
    bool dirty, broken, refused;
    bool ended; /* by the host */
    bool lasting; /* its descriptors are reused for the next connection */
};

/* stream.c */
struct stream *find_stream(struct connection *connection, uint32_t number);
void open_stream(struct connection *connection, uint32_t number, const uint8_t *payload, size_t length);
void forget_stream(struct stream *stream);

/* connection.c */
int connection_open(int in, int out, bool lasting);
void refuse(struct connection *connection, const char *why); /* report the reason on stream 0, send pending output, then close */
uint8_t *out_room(struct connection *connection, size_t length);
void write_header(uint8_t *at, size_t length, uint32_t number, unsigned type, unsigned channel);
void send_frame(struct connection *connection, uint32_t number, unsigned type, const void *payload, size_t length);
void mark_dirty(struct connection *connection);

/* listener.c */
void accept_more(void); /* a connection has ended */
void look_later(int in, int out, bool ended);

#endif

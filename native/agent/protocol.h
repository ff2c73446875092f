/* The constants of the agent protocol, which docs/protocol.md describes. */
#ifndef ATOLL_PROTOCOL_H
#define ATOLL_PROTOCOL_H

enum {
    PROTOCOL_VERSION = 1,
    HEADER_SIZE = 12,
    MAX_PAYLOAD = 262144,
    WINDOW = 262144,
    MAX_CONNECTIONS = 64,
    MAX_STREAMS = 4096,
    MAX_PROCESSES = 4096,
    MAX_ID = 64,
    MAX_ARG = 131072,
    RECORD_SIZE = 36,
};

enum frame_type {
    FRAME_OPEN = 1,
    FRAME_DATA = 2,
    FRAME_END = 3,
    FRAME_CREDIT = 4,
    FRAME_CONTROL = 5,
    FRAME_CLOSE = 6,
    FRAME_EVENT = 7,
    FRAME_ERROR = 8,
};

enum operation {
    OP_HELLO = 1,
    OP_STATS = 2,
    OP_START = 10,
    OP_ATTACH = 11,
    OP_PROCESSES = 12,
    OP_KILL = 13,
    OP_RELEASE = 14,
    OP_RESTARTS = 15,
    OP_SUDO = 16,
    OP_STAT = 20,
    OP_LIST = 21,
    OP_MKDIR = 22,
    OP_RENAME = 23,
    OP_REMOVE = 24,
    OP_CHMOD = 25,
    OP_CHOWN = 26,
    OP_SYMLINK = 27,
    OP_READ = 28,
    OP_WRITE = 29,
    OP_WALK = 30,
    OP_PUT_TREE = 31,
    OP_GET_TREE = 32,
    OP_WATCH = 33,
    OP_CONNECT = 40,
};

enum control_verb { VERB_RESIZE = 1, VERB_SIGNAL = 2 };

enum event_kind {
    EVENT_STARTED = 1,
    EVENT_ATTACHED = 2,
    EVENT_FILE = 3,
    EVENT_READY = 4,
    EVENT_CONNECTED = 5,
    EVENT_EOF = 6,
};

enum start_flag {
    START_STDIN = 1,
    START_PTY = 2,
    START_MERGE = 4,
    START_STATUS = 8,
    START_STARTED = 16,
    START_DETACH = 32,
    START_FORGET = 64,
    START_CLEAN = 128,
    START_EXISTING = 256,
};

enum restart_policy { RESTART_NEVER = 0, RESTART_ALWAYS = 1, RESTART_ON_FAILURE = 2 };

enum cause { CAUSE_EXIT = 1, CAUSE_SIGNAL = 2, CAUSE_TIMEOUT = 3, CAUSE_KILLED = 4, CAUSE_LOST = 5 };

enum tag {
    TAG_ID = 1,
    TAG_ARG = 2,
    TAG_SHELL = 3,
    TAG_ENV = 4,
    TAG_CWD = 5,
    TAG_USER = 6,
    TAG_FLAGS = 7,
    TAG_DEADLINE_MS = 8,
    TAG_GRACE_MS = 9,
    TAG_RLIMIT = 10,
    TAG_ROWS = 11,
    TAG_COLS = 12,
    TAG_KEEP = 13,
    TAG_OFFSET_1 = 14,
    TAG_SIGNAL = 17,
    TAG_PID = 18,
    TAG_EXIT_CODE = 19,
    TAG_TERM_SIGNAL = 20,
    TAG_CAUSE = 21,
    TAG_END_1 = 22,
    TAG_DURATION_NS = 25,
    TAG_CPU_NS = 26,
    TAG_MAX_RSS_BYTES = 27,
    TAG_ERRNO = 28,
    TAG_MESSAGE = 29,
    TAG_PATH = 30,
    TAG_TARGET = 31,
    TAG_MODE = 32,
    TAG_UID = 33,
    TAG_GID = 34,
    TAG_SIZE = 35,
    TAG_MTIME_NS = 36,
    TAG_KIND = 37,
    TAG_OFFSET = 38,
    TAG_LENGTH = 39,
    TAG_NLINK = 40,
    TAG_INODE = 41,
    TAG_DEVICE = 42,
    TAG_PORT = 50,
    TAG_VERSION = 60,
    TAG_INSTANCE = 61,
    TAG_UPTIME_NS = 62,
    TAG_RSS_BYTES = 63,
    TAG_PROCESSES = 64,
    TAG_STREAMS = 65,
    TAG_CONNECTIONS = 66,
    TAG_OUTPUT_BYTES = 67,
    TAG_CAPACITY = 68,
    TAG_RUNNING = 69,
    TAG_RESTART = 70,
};

#endif

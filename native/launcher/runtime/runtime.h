/* The declarations that the programs in atoll-mount share. Read main.c first. */
#ifndef ATOLL_RUNTIME_H
#define ATOLL_RUNTIME_H

#include "../core/core.h"

enum { CLOSE_AT_EXECUTION = 4 /* CLOSE_RANGE_CLOEXEC */ };

extern struct worker me;
extern int report_fd; /* where failures are reported */

void load_words(int fd);
void install_filter_from(int fd, int guard);
long fork_process(void); /* returns 0 in the child */
_Noreturn void leave(int status);

_Noreturn void prepare(int list, char **command, char **environment);                                     /* prepare.c */
_Noreturn void within(int list, int filter, int program, int guard, char **arguments, char **environment); /* within.c */
void let_go_of_loops(void);                                                                               /* loops.c */
_Noreturn void supervise(int channel, bool with_virtual_kernel);                                          /* supervisor.c */

#endif

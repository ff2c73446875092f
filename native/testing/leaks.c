/* Only in the sanitizer build: SIGTERM ends the agent with exit(), so that leaks are detected and reported. */
#include <signal.h>
#include <stdlib.h>

static void leave(int signal)
{
    (void)signal;
    exit(0);
}

__attribute__((constructor)) static void prepare(void)
{
    sigaction(SIGTERM, &(struct sigaction){.sa_handler = leave}, NULL);
}

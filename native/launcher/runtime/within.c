/* atoll-mount within: the steps that need the sandbox's /proc, and those for which the OCI runtime need not be trusted. */
#include <linux/prctl.h>

#include "runtime.h"

enum { FIRST_TO_CLOSE = 4 }; /* 3 is the agent's socket */

static struct tree tree = NO_TREE;

static _Noreturn void execute(int filter, int program, int guard, char **arguments, char **environment)
{
    keep_only(&me, next_number(&me));
    need(&me, CALL(close_range, FIRST_TO_CLOSE, ~0u, CLOSE_AT_EXECUTION));
    need(&me, CALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    install_filter_from(filter, guard);
    me.step = "execute";
    need(&me, CALL(execveat, program, "", arguments, environment, AT_EMPTY_PATH));
    me.give_up(&me, EINVAL);
}

_Noreturn void within(int list, int filter, int program, int guard, char **arguments, char **environment)
{
    load_words(list);
    for (;;) {
        me.step = next_word(&me);
        me.detail = "";
        if (!strcmp(me.step, "execute")) /* execute CAPABILITIES: drop all others and execute the agent */
            execute(filter, program, guard, arguments, environment);
        if (!inside_operation(&me, &tree, me.step) && !host_operation(&me, me.step, -1))
            me.give_up(&me, ENOSYS);
    }
}

/* Numbered slots for mounts. The process that creates a mount and the one that attaches it may be different; they then run
 * concurrently and share their memory. */
#include <linux/futex.h>

#include "core.h"

static int slots[MAX_SLOTS]; /* 0: empty; else a descriptor + 1 */

void futex_wait(int *word, int value)
{
    CALL(futex, word, FUTEX_WAIT, value, NULL, NULL, 0);
}

void futex_wake(int *word)
{
    CALL(futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void publish(struct worker *worker, unsigned long slot, int mount)
{
    if (slot >= MAX_SLOTS || slots[slot])
        worker->give_up(worker, EINVAL);
    __atomic_store_n(&slots[slot], mount + 1, __ATOMIC_SEQ_CST);
    if (!worker->alone)
        futex_wake(&slots[slot]);
}

int take(struct worker *worker, unsigned long slot)
{
    int found;
    if (slot >= MAX_SLOTS)
        worker->give_up(worker, EINVAL);
    while (!(found = __atomic_load_n(&slots[slot], __ATOMIC_SEQ_CST))) {
        if (worker->alone)
            worker->give_up(worker, ENOENT);
        futex_wait(&slots[slot], 0);
    }
    return found - 1;
}

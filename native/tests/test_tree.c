/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "tree.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io.h"
#include "procfs.h"

static unsigned reaped;

static void note(pid_t pid, int status, void *data)
{
    (void)status;
    CHECK(pid > 0);
    ++*(unsigned *)data;
}

static pid_t family(void)
{
    pid_t child = fork();
    if (child != 0)
        return child;
    for (int i = 0; i < 3; i++)
        if (fork() == 0) {
            signal(SIGTERM, SIG_IGN);
            if (i == 2 && fork() != 0)
                _exit(0); /* an orphan, which the subreaper above takes */
            for (;;)
                pause();
        }
    for (;;)
        pause();
}

int main(void)
{
    struct tree tree = {0};
    CHECK(proc_open() == -1 && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
    CHECK(tree_collect(&tree, getpid(), true) && tree.count == 1);
    pid_t child = family();
    CHECK(child > 0);
    double deadline = io_now() + 10.0;
    do {
        io_sleep_ms(1);
        CHECK(tree_collect(&tree, getpid(), true) && io_now() < deadline);
    } while (tree.count != 6); /* this, child, 2 children, a zombie, the orphan */
    CHECK(tree.tasks[0].pid == getpid() && tree_find(&tree, child) != NULL);
    CHECK(tree_find(&tree, 1) == NULL);
    CHECK(tree_memory(&tree) > 0);

    /* A number alone is not enough: another start time means another process. */
    struct tree_task wrong = *tree_find(&tree, child);
    wrong.starttime++;
    CHECK(!tree_signal_task(&wrong, SIGKILL));
    CHECK(tree_signal_task(tree_find(&tree, child), SIGSTOP));
    CHECK(tree_collect(&tree, child, true));
    for (size_t i = 1; i < tree.count; i++)
        tree_signal_task(&tree.tasks[i], SIGSTOP);
    CHECK(tree_wait_stopped(&tree, io_now() + 5.0));

    /* What was stopped before stays stopped. */
    struct proc_stat stat;
    struct tree before = {0};
    CHECK(tree_collect(&before, child, true));
    for (size_t i = 1; i < before.count; i++)
        before.tasks[i].state = 'S';
    tree_thaw(&tree, &before);
    CHECK(!tree_wait_stopped(&tree, io_now() + 0.05));
    CHECK(proc_stat(child, &stat) && stat.state == 'T');
    tree_free(&before);
    tree_free(&tree);
    tree_free(&tree);

    CHECK(tree_end_descendants(io_now() + 10.0, note, &reaped));
    CHECK(reaped == 5 || reaped == 4); /* the zombie's parent may have reaped nothing: then it is ours */
    CHECK(waitpid(-1, NULL, WNOHANG) == -1);
    CHECK(tree_end_descendants(io_now() + 10.0, NULL, NULL));
    return 0;
}

/* Runs a command once and prints its fork-to-exit time in ns, its peak resident memory in KiB and its wait status.
 *
 * The bench starts what it measures through this small process and not from its own: Linux counts the memory that a child
 * has between fork and exec, a copy of its parent's, into the child's ru_maxrss, and the bench is larger than the
 * programs that it measures.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct timespec start, end;
    struct rusage usage;
    int status;
    if (argc < 2)
        return 2;
    clock_gettime(CLOCK_MONOTONIC, &start);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
        execv(argv[1], argv + 1);
        _exit(127);
    }
    if (pid < 0 || wait4(pid, &status, 0, &usage) != pid)
        return 1;
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("%lld %ld %d\n", (end.tv_sec - start.tv_sec) * 1000000000ll + end.tv_nsec - start.tv_nsec, usage.ru_maxrss,
           status);
    return 0;
}

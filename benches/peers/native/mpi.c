/* Open MPI: a message of 8 bytes one way, the value the other way. It always polls.
   Usage: mpirun ... mpi BYTES MILLISECONDS, two ranks. */
#include <mpi.h>
#include <stdint.h>
#include <string.h>

#include "timing.h"

enum { CLIENT = 0, SERVER = 1, ASK = 1, ANSWER = 2 };

static char *value;
static int bytes;

static void pull(void) {
    uint64_t number = 8;
    MPI_Send(&number, sizeof number, MPI_BYTE, SERVER, ASK, MPI_COMM_WORLD);
    MPI_Recv(value, bytes, MPI_BYTE, SERVER, ANSWER, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void serve(void) {
    uint64_t number = 8;
    for (;;) {
        MPI_Recv(&number, sizeof number, MPI_BYTE, CLIENT, ASK, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (number == 0) {
            return;
        }
        MPI_Send(value, bytes, MPI_BYTE, CLIENT, ANSWER, MPI_COMM_WORLD);
    }
}

int main(int count, char **arguments) {
    int rank = 0;
    uint64_t none = 0;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (count != 3) {
        fail("usage: mpi BYTES MILLISECONDS");
    }
    bytes = atoi(arguments[1]);
    value = malloc((size_t)bytes);
    memset(value, 7, (size_t)bytes);
    if (rank == CLIENT) {
        time_and_print(pull, atof(arguments[2]) / 1e3);
        MPI_Send(&none, sizeof none, MPI_BYTE, SERVER, ASK, MPI_COMM_WORLD);
    } else {
        serve();
    }
    MPI_Finalize();
    return 0;
}

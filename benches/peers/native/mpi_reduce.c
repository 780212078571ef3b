/* Open MPI: the sum of 32-bit floats of all ranks, in place; or a barrier. It always polls.
   Usage: mpirun ... mpi_reduce BYTES MILLISECONDS; 0 bytes are a barrier. */
#include <mpi.h>

#include "timing.h"

static float *values;
static int count;

static void reduce(void) {
    MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void barrier(void) {
    MPI_Barrier(MPI_COMM_WORLD);
}

static long first_says(long number) {
    MPI_Bcast(&number, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    return number;
}

int main(int words, char **arguments) {
    int rank = 0;
    MPI_Init(&words, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (words != 3) {
        fail("usage: mpi_reduce BYTES MILLISECONDS");
    }
    count = atoi(arguments[1]) / (int)sizeof *values;
    values = calloc((size_t)count, sizeof *values);
    time_together(count == 0 ? barrier : reduce, first_says, rank == 0, atof(arguments[2]) / 1e3);
    MPI_Finalize();
    return 0;
}

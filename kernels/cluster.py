"""Row sums and moments over the CTAs of a cluster, through distributed shared memory.

Triton 3.6 spreads tensors and TMA copies over a cluster, but it does not reduce across one and offers no address of
shared memory. The exchange is therefore PTX, on a few bytes of static shared memory per CTA. Each CTA sends its share
to every CTA of the cluster, itself included, by stores that complete on the receiver's mbarrier. It waits for its own
mbarrier and then sums (or merges) the shares in the order of the CTAs, which is the same in all of them. A cluster
barrier in place of the mbarrier would also wait for other memory accesses, such as stores to global memory.

Hazards of an exchange:
- A share must find an initialized mbarrier: every CTA initializes its own, fences and arrives at a cluster barrier
  (`open_exchange`), and waits at that barrier (`join_cluster`) before its first exchange.
- A phase must not complete early: a share may arrive before its receiver expects the bytes, but the phase also needs
  the arrival of the receiver's own thread, which comes with the expected bytes of all shares.
- A share must not overwrite one that is still to be read: there are two buffers, used in turn, and exchange n + 2
  reuses the buffer of exchange n. A CTA starts n + 2 only after it has received all shares of n + 1. All threads of
  their senders had read the shares of n by then: the CTA barrier of the sender's next row sum lies between.
- A share must not reach a CTA that has ended: each CTA waits for all shares of its last exchange.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import ptx
from .gluon_compat import MEETS_AT_THE_END


class Exchange(NamedTuple):
    """The state of a CTA's exchanges."""

    address: gl.tensor  # of its buffers
    number: gl.tensor  # exchanges so far


@gluon.jit
def open_exchange(tile: gl.constexpr):
    """Initialize the CTA's mbarriers. `join_cluster` must come before the first exchange."""
    address = gl.to_tensor(0)
    if tile.cluster > 1:
        address = ptx.open_exchange(tile)
    return Exchange(address, gl.to_tensor(0))


@gluon.jit
def join_cluster(exchange, tile: gl.constexpr):
    """Return once every CTA of the cluster has opened its exchange. Without this wait, a share could be sent to an
    mbarrier that is not initialized yet."""
    address = exchange.address
    if tile.cluster > 1:
        address = ptx.wait_for_cluster(address)
    return Exchange(address, exchange.number)


@gluon.constexpr_function
def meets_at_the_end(tile):
    return tile.cluster > 1 and MEETS_AT_THE_END


@gluon.jit
def leave_cluster(tile: gl.constexpr):
    """End the CTA here, without the barrier that some releases of Triton put before a kernel's end. That barrier waits
    until all that the cluster has stored is visible, and holds the place of the next CTA meanwhile. Nobody needs it: a
    CTA whose rows are done has received every share that was sent to it."""
    if meets_at_the_end(tile):
        ptx.end_thread()


@gluon.jit
def sum_over_cluster(sums, exchange, tile: gl.constexpr, moments: gl.constexpr = False):
    """Sums over the whole cluster, in every CTA, and the state for the next exchange. `sums` is a tuple of one or two
    sums [rows, cluster], of which each CTA holds its own; with `moments`, a mean and a variance over equal numbers of
    elements, which are merged."""
    number = exchange.number
    if tile.cluster > 1:
        sums = ptx.exchange(sums, exchange.address, number, moments, tile)
        number += 1
    return sums, Exchange(exchange.address, number)

"""Row sums and moments over the CTAs of a cluster, through distributed shared memory.

Triton 3.6 spreads tensors and TMA copies over a cluster, but it does not reduce across one and offers no address of
shared memory. The exchange is therefore PTX, on a few bytes of static shared memory per CTA. Each CTA sends its share
to every CTA of the cluster, itself included, by stores that complete on the receiver's mbarrier. It waits for its own
mbarrier and then sums (or merges) the shares in the order of the CTAs, so the results are equal bit for bit in all of
them. A cluster barrier in place of the mbarrier would also wait for other memory accesses, such as stores to global
memory. The CTAs of a cluster work on the same row tiles, so all take part in every exchange.

Hazards of an exchange:
- A share must find an initialized mbarrier: every CTA initializes its own, fences and arrives at a cluster barrier
  (`open_exchange`), and waits at that barrier (`join_cluster`) before its first exchange. Other work fits between.
- A phase must not complete early: a share may arrive before its receiver expects the bytes, but the phase also needs
  the arrival of a thread of the receiver, and this arrival is what expects the bytes of all shares.
- A share must not overwrite one that is still to be read: there are two buffers, used in turn, and exchange n + 2
  reuses the buffer of exchange n. A CTA starts n + 2 only after it has received all shares of n + 1. Each sender had
  read the shares of n, in all its threads, before it sent its share of n + 1: the CTA barrier of its row sum lies
  between. The same barrier keeps a thread from being a phase late at an mbarrier, whose phases a wait knows by parity.
- A share must not reach a CTA that has ended: each CTA waits for all shares of its last exchange.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import ptx
from .gluon_compat import MEETS_AT_THE_END


class Exchange(NamedTuple):
    """The state of a CTA's exchanges."""

    address: gl.tensor  # of its mbarriers, which its buffers follow
    number: gl.tensor  # exchanges so far


@gluon.jit
def open_exchange(tile: gl.constexpr):
    """Initialize the CTA's mbarriers and arrive at the cluster barrier. `join_cluster`, which waits there, must come
    before the first exchange. Without a cluster the state is a placeholder."""
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
    """End the CTA here, without the cluster barrier that some releases of Triton put before a kernel's end. That
    barrier waits until all that the cluster has stored is visible, and meanwhile the CTA keeps its SM's room from the
    next CTA. The exchange does not need it: a CTA whose rows are done has received every share that was sent to it."""
    if meets_at_the_end(tile):
        ptx.end_thread()


@gluon.jit
def sum_over_cluster(sums, exchange, tile: gl.constexpr, moments: gl.constexpr = False):
    """Sums over the whole cluster, in every CTA, and the state for the next exchange. `sums` is a tuple of one or two
    sums [rows, cluster]; each CTA holds its own share. With `moments` it is a mean and a variance, which are merged;
    the CTAs have equally many columns. All threads of the CTA must come here, with a CTA barrier (such as the row
    sum's) since the last exchange."""
    number = exchange.number
    if tile.cluster > 1:
        sums = ptx.exchange(sums, exchange.address, number, moments, tile)
        number += 1
    return sums, Exchange(exchange.address, number)

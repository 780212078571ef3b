//! AbortRecv and AbortSend: a handle ends one wait, and the next one works.

use tensorwire_collective::{GroupError, pair::AbortHandle};
use tensorwire_fabric::FabricKind;

use super::{SHORT, over_fabrics, ranks, tensor, values};

over_fabrics! {
    abort_recv,
    abort_send,
    abort_of_buffers,
}

fn is_aborted<T>(ended: &Result<T, GroupError>) -> bool {
    matches!(ended, Err(GroupError::Aborted { .. }))
}

async fn abort_recv(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let handle = AbortHandle::new();
    for early in [true, false] {
        let aborting = async {
            if !early {
                zero.worker().runtime().sleep(SHORT / 10).await;
            }
            handle.abort();
            handle.abort();
        };
        let (aborted, ()) = futures::join!(zero.recv(.., 1).abort_by(&handle).into_future(), aborting);
        assert!(is_aborted(&aborted), "{aborted:?}");
        if !early {
            // The second call came while nothing waited: it ends the next wait.
            assert!(is_aborted(&zero.recv(1, 1).abort_by(&handle).await));
        }
        let sent = one.send(0, 1, tensor(one, &[4])).unwrap();
        let received = zero.recv(.., 1).abort_by(&handle).await;
        let received =
            if is_aborted(&received) { zero.recv(.., 1).abort_by(&handle).await } else { received };
        assert_eq!(values(&received.unwrap().tensor), [4]);
        sent.await.unwrap();
    }
    ranks.shutdown().await;
}

async fn abort_send(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let handle = AbortHandle::new();
    let mut sent = zero.send(1, 1, tensor(zero, &[4])).unwrap();
    let (aborted, ()) = futures::join!(sent.wait().abort_by(&handle).into_future(), async { handle.abort() });
    assert!(is_aborted(&aborted), "{aborted:?}");
    assert_eq!(values(&one.recv(0, 1).await.unwrap().tensor), [4]);
    sent.wait().abort_by(&handle).await.unwrap();
    sent.await.unwrap();
    ranks.shutdown().await;
}

async fn abort_of_buffers(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let handle = AbortHandle::new();
    let mut outgoing = zero.send_buffer(1, 3, 4).unwrap();
    outgoing.send(0, 4, 0).await.unwrap();
    let (aborted, ()) =
        futures::join!(outgoing.wait_send().abort_by(&handle).into_future(), async { handle.abort() });
    assert!(is_aborted(&aborted), "{aborted:?}");
    let mut incoming = one.recv_buffer(0, 3, 4).unwrap();
    outgoing.wait_send().abort_by(&handle).await.unwrap();
    assert_eq!(incoming.wait_recv().await.unwrap(), 0..4);
    let (aborted, ()) =
        futures::join!(incoming.wait_recv().abort_by(&handle).into_future(), async { handle.abort() });
    assert!(is_aborted(&aborted), "{aborted:?}");
    outgoing.send(0, 2, 2).await.unwrap();
    assert_eq!(incoming.wait_recv().abort_by(&handle).await.unwrap(), 2..4);
    outgoing.wait_send().await.unwrap();
    drop((outgoing, incoming));
    ranks.shutdown().await;
}

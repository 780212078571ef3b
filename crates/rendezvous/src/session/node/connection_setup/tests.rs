//! Connections for tests of the types that hold them.

use futures::future::join;

use super::*;
use crate::{session::tests::session_of, worker::Worker};

/// A live connection, whose other side is the worker's too.
pub(crate) async fn connection(worker: &Worker) -> Arc<DataConnection> {
    let node = &worker.node;
    let fabric = &node.settings.fabrics[0];
    let sessions = [true, false].map(|dialled| session_of(1, None, dialled));
    let numbers = sessions.each_ref().map(|session| session.open().unwrap().0);
    let [dialer, acceptor] = [(); 2].map(|()| node.prepare(fabric).unwrap());
    let to_dialer = node.offer(numbers[0], fabric, &acceptor);
    let to_acceptor = node.offer(numbers[1], fabric, &dialer);
    let (connection, other) = join(
        node.join(fabric, &sessions[0], dialer, to_dialer, true),
        node.join(fabric, &sessions[1], acceptor, to_acceptor, false),
    )
    .await;
    // The tasks of the other connection hold a reference to it.
    other.unwrap();
    connection.unwrap()
}

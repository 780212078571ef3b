//! Who assigns the cell of a reply, fills it and empties it, under every interleaving that loom finds.

use loom::{
    sync::{Arc, Mutex},
    thread,
};

use crate::{model, reply_cell::ReplyCell};

/// The cell, and the request that has it: as in the table of requests, which is locked.
struct Table {
    cell: ReplyCell,
    assigned: Mutex<Option<usize>>,
}

impl Table {
    fn assign(&self, request: usize) -> bool {
        let mut assigned = self.assigned.lock().unwrap();
        let is_free = assigned.is_none() && self.cell.is_empty();
        if is_free {
            *assigned = Some(request);
        }
        is_free
    }

    /// The reply to whatever request has the cell.
    fn put(&self) {
        if let Some(request) = self.assigned.lock().unwrap().take() {
            assert!(self.cell.put(request, &[request as u8; 16]));
        }
    }

    /// The task of `request`, which has the cell, takes its reply, or gives the request up before it has come.
    fn take_or_give_up(&self, request: usize) {
        let mut taken = self.cell.take();
        if taken.is_none() {
            let mut assigned = self.assigned.lock().unwrap();
            taken = self.cell.take();
            assert_eq!(*assigned == Some(request), taken.is_none());
            assigned.take_if(|assigned| *assigned == request);
        }
        if let Some(taken) = taken {
            assert_eq!((taken.which, taken.bytes()), (request, &[request as u8; 16][..]));
        }
    }
}

#[test]
fn a_reply_is_taken_whole_and_by_the_task_whose_request_had_the_cell() {
    model(|| {
        let table = Arc::new(Table { cell: ReplyCell::new(), assigned: Mutex::new(None) });
        let tasks: Vec<_> = (1..=2)
            .map(|request| {
                let table = table.clone();
                thread::spawn(move || {
                    if table.assign(request) {
                        table.take_or_give_up(request);
                    }
                })
            })
            .collect();
        (0..2).for_each(|_| table.put());
        tasks.into_iter().for_each(|task| task.join().unwrap());
        assert!(table.cell.is_empty() && table.assigned.lock().unwrap().is_none());
    });
}

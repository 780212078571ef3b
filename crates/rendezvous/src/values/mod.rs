//! The values that a worker offers: values of steps, and published tensors.

pub(crate) mod arenas;
pub(crate) mod arguments;
pub(crate) mod calls;
pub(crate) mod catalogue;
pub(crate) mod cut;
pub(crate) mod device_context;
pub(crate) mod device_copy;
pub(crate) mod duplicates;
pub(crate) mod end_signal;
pub(crate) mod latch;
pub(crate) mod lost_steps;
pub(crate) mod offers;
pub(crate) mod pending;
pub(crate) mod published;
pub(crate) mod sets;
mod sharded_map;
pub(crate) mod steps;
pub(crate) mod table;
pub(crate) mod takers;
pub(crate) mod tensor;
pub(crate) mod tensor_list;
mod tensor_proto;
pub(crate) mod traces;
pub(crate) mod value_guard;
pub(crate) mod versions;

use std::sync::Arc;

use tensorwire_protocol::{Code, DeviceName, Key, Offered, Scope, SetContent, Status, StepId, Wanted};

use self::{
    arenas::Arenas,
    calls::Calls,
    catalogue::Listing,
    lost_steps::LostSteps,
    offers::Offers,
    published::{Edition, PublishedSet},
    sets::Sets,
    steps::StepTable,
};

/// The values of this worker.
#[derive(Debug)]
pub(crate) struct Values {
    pub(crate) worker: String,
    /// The worker's name, parsed.
    pub(crate) device: DeviceName,
    pub(crate) incarnation: u64,
    pub(crate) steps: StepTable,
    pub(crate) published: PublishedSet,
    pub(crate) lost: LostSteps,
    pub(crate) offers: Offers,
    pub(crate) sets: Sets,
    /// The heads of the newest versions of the sets.
    pub(crate) heads: PublishedSet,
    pub(crate) arenas: Arenas,
    pub(crate) calls: Calls,
}

impl Values {
    /// Ends `steps` with `peer`, because a connection to it broke for `why` while values of them were under way.
    pub(crate) fn lose(&self, peer: &str, steps: &[StepId], why: &str) {
        self.lost.note(steps, peer, why);
        for &step in steps {
            self.steps.drop_values(step, |key| {
                destination_worker(&key.to_string()).is_some_and(|worker| worker == peer)
            });
        }
    }

    /// The tensor published under `name`, or offered, for this worker's own user.
    pub(crate) async fn own(&self, scope: Scope, name: &str) -> Result<Edition, Status> {
        match scope {
            Scope::Versioned(wanted @ Wanted::NewerThan { .. }) => {
                self.published.edition(name, wanted, None).await
            }
            Scope::Offered(offered) => self.offered(offered),
            Scope::Set(wanted @ Wanted::NewerThan { .. }) => self.heads.edition(name, wanted, None).await,
            Scope::Set(Wanted::Now) => self.head(name),
            Scope::SetContent(content) => self.set_content(name, content),
            _ => self.published(name),
        }
    }

    /// The tensor that is published under `name` now.
    pub(crate) fn published(&self, name: &str) -> Result<Edition, Status> {
        self.published.get(name).ok_or_else(|| {
            let message = format!(
                "{} has published nothing under `{name}`: list what it has published, or let the fetch wait for it",
                self.worker
            );
            Status::new(Code::NotFound, message)
        })
    }

    /// The offered tensor.
    pub(crate) fn offered(&self, offered: Offered) -> Result<Edition, Status> {
        self.offers.get(offered).ok_or_else(|| Status::new(Code::NotFound, "the offer has ended"))
    }

    /// The head of the newest version of the set.
    pub(crate) fn head(&self, name: &str) -> Result<Edition, Status> {
        self.heads.get(name).ok_or_else(|| {
            let message = format!(
                "{} has committed no version of a set `{name}`: list what it has, or follow the set to wait for one",
                self.worker
            );
            Status::new(Code::NotFound, message)
        })
    }

    /// The list of the sets that `reader` may read, encoded.
    pub(crate) fn set_list(&self, reader: Option<&str>) -> Edition {
        let tensor = sets::encoded(&sets::listing::encode(&self.sets.list(reader)));
        Edition::unnamed(0, tensor, Listing::Refused)
    }

    /// A content of a version of the set.
    pub(crate) fn set_content(&self, name: &str, content: SetContent) -> Result<Edition, Status> {
        let tensor = self.sets.content(name, content)?;
        Ok(Edition::unnamed(content.edition, tensor, Listing::Refused))
    }

    /// Checks that `key` names this incarnation of the worker.
    pub(crate) fn check_incarnation(&self, key: &Key) -> Result<(), Status> {
        if key.incarnation() == self.incarnation
            || tensorwire_testpoints::planted!("a key of an earlier incarnation is accepted")
        {
            return Ok(());
        }
        let message = format!(
            "`{key}` names incarnation {:016x} of {}, which is now {:016x}: it has restarted; make a new key with \
             Worker::key",
            key.incarnation(),
            self.worker,
            self.incarnation
        );
        Err(Status::new(Code::Aborted, message))
    }
}

/// The destination worker in a table key.
fn destination_worker(table_key: &str) -> Option<String> {
    table_key.split(';').nth(1)?.parse::<DeviceName>().ok()?.worker()
}

/// The edition that stands for the list of sets in requests. No version has it.
pub(crate) const SET_LIST: u64 = 0;

/// Shared by all connections of the worker.
pub(crate) type SharedValues = Arc<Values>;

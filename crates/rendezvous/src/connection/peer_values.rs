//! Answers to a peer's requests: values of steps, and published tensors.

use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard, PoisonError, Weak},
};

use futures::stream::BoxStream;
use tensorwire_fabric::{BoxFuture, CELL_CONTENT_BYTES, OfferedCatalogue};
use tensorwire_memory::Buf;
use tensorwire_protocol::{
    Checksums, Code, DeviceName, Key, Metadata, Offered, Scope, Sequenced, SetContent, Source, Status,
    StepId, SubscriptionTerms, Take, TensorRequest, Wanted,
};
use tensorwire_testpoints::sync::Mutex;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use crate::{
    connection::{
        DataConnection,
        call_turns::{CallPermits, CallTurns},
        gathering::Gathering,
        meter::Meter,
        refusals::Refusals,
        sent_pages::AnswerPages,
    },
    error::KeyEnd,
    values::{
        SET_LIST, SharedValues,
        catalogue::Listing,
        device_copy::is_on_host,
        published::{Edition, WaitingAnswers},
        sets::{
            encoded,
            manifest::{MANIFEST, MANIFEST_DELTA},
        },
        steps::{Asked, StepRef},
        table::{TakenValue, dropped},
        tensor::Tensor,
        value_guard::ValueGuard,
    },
};

/// The values of this worker, as one peer may request them.
#[derive(Debug)]
pub(crate) struct PeerValues {
    pub(crate) values: SharedValues,
    pub(crate) peer: String,
    /// The peer's name, parsed; empty if it is not a worker's name, so that no key matches it.
    device: DeviceName,
    /// A key from this worker to the peer. Those that the peer requests differ from it in the edge alone, mostly, and need not
    /// be parsed and checked then.
    key: Option<Key>,
    pub(crate) meter: Arc<Meter>,
    /// The catalogue that the peer reads, if the fabric has them.
    catalogue: Option<OfferedCatalogue>,
    /// The answers that wait for publications.
    answers: Arc<dyn WaitingAnswers>,
    refusals: Refusals,
    pub(super) gathering: Gathering,
    pub(super) call_turns: CallTurns,
    /// The versions of sets that the peer is fetching, by the names of the sets.
    pins: Mutex<BTreeMap<Arc<str>, Pin>>,
    /// The connection with the peer, which owns this.
    pub(super) connection: Weak<DataConnection>,
}

/// Keeps a version of a set while the peer fetches it.
#[derive(Debug)]
struct Pin {
    values: SharedValues,
    set: Arc<str>,
    /// `None` once it is dropped.
    version: Option<Arc<()>>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.version = None;
        self.values.sets.release(&self.set);
    }
}

impl PeerValues {
    pub(crate) fn new(
        values: &SharedValues,
        peer: &str,
        meter: Arc<Meter>,
        (answers, catalogue): (Arc<dyn WaitingAnswers>, Option<OfferedCatalogue>),
        (refusals, gathering, call_turns): (Refusals, Gathering, CallTurns),
        connection: Weak<DataConnection>,
    ) -> Self {
        let device = peer.parse().unwrap_or_default();
        let key = Key::builder().source(&values.worker).incarnation(values.incarnation).destination(peer);
        let key = key.edge("any").build().ok();
        let mut own = Self {
            values: values.clone(),
            peer: peer.to_owned(),
            device,
            key: None,
            meter,
            catalogue,
            answers,
            refusals,
            gathering,
            call_turns,
            pins: Mutex::default(),
            connection,
        };
        own.key = key.filter(|key| own.check(key).is_ok());
        own
    }

    /// The published tensor, which the peer reads by itself the next time, if it can.
    fn published(&self, name: &str) -> Result<Edition, Status> {
        let edition = self.values.published(name)?;
        if let Some(catalogue) = &self.catalogue {
            list(&self.values, catalogue, (name, &edition));
        }
        Ok(edition)
    }

    /// The offered tensor, which the peer reads by itself the next time, if it can.
    fn offered(&self, offered: Offered) -> Result<Edition, Status> {
        let edition = self.values.offered(offered)?;
        if let Some(catalogue) = &self.catalogue {
            if edition.listing == Listing::Unlisted {
                self.values.offers.list(offered.cell, catalogue.catalogue());
            }
            share(catalogue, &edition);
        }
        Ok(edition)
    }

    /// The connection, which owns this, while it lasts.
    pub(super) fn own_connection(&self) -> Result<Arc<DataConnection>, Status> {
        self.connection.upgrade().ok_or_else(|| Status::new(Code::Unavailable, "the connection is over"))
    }

    /// The answers that wait for publications.
    pub(super) fn answers(&self) -> Arc<dyn WaitingAnswers> {
        self.answers.clone()
    }

    /// Checks that the source of `key` is a device of this worker and the destination a device of the peer.
    fn check_ends(&self, key: &Key) -> Result<(), Status> {
        let ends = [
            (KeyEnd::Source, key.source_device(), &self.values.device, &self.values.worker),
            (KeyEnd::Destination, key.destination_device(), &self.device, &self.peer),
        ];
        for (end, device, own, worker) in ends {
            if !device.is_same_address_space(own) {
                let message = format!("Invalid rendezvous key ({end}): {key} @ {worker}");
                return Err(Status::new(Code::InvalidArgument, message));
            }
        }
        Ok(())
    }

    /// Checks that the peer may receive values of `key`.
    fn check(&self, key: &Key) -> Result<(), Status> {
        self.check_ends(key)?;
        self.values.check_incarnation(key)
    }

    /// The key, checked, and the step in which it is asked for.
    fn ask(&self, step: StepId, key: &Arc<str>) -> Result<(Key, Asked), Status> {
        let alike = self.key.as_ref().and_then(|own| own.parse_alike(key));
        let is_checked = alike.is_some();
        let key = alike.map_or_else(|| key.parse(), Ok)?;
        let asked = self.values.steps.ask(step, &self.peer)?;
        if !is_checked {
            self.check(&key)?;
        }
        self.values.lost.status(step, &self.peer).map_or(Ok(()), Err)?;
        Ok((key, asked))
    }

    /// Takes a value of a step.
    fn of_step(&self, (step, is_now): (StepId, bool), key: &Arc<str>) -> Take<Taken, Taking> {
        let (key, asked) = match self.ask(step, key) {
            Ok(asked) => asked,
            Err(status) => return Take::Now(Err(status)),
        };
        // A request that must not wait is made with a cancelled token.
        let cancelled = is_now.then(CancellationToken::new);
        cancelled.iter().for_each(CancellationToken::cancel);
        match asked.take_or_wait(&key, cancelled.as_ref()) {
            Take::Now(Ok((value, step))) if is_on_host(&key, &value.value.send_args) => {
                Take::Now(Ok(Taken::Step { value, on_host: None, step }))
            }
            Take::Now(Ok((value, step))) => {
                let held = Held { value: ValueGuard::new(value), step };
                Take::Later(Box::pin(brought(held, key, self.meter.clone())))
            }
            Take::Now(Err(status)) => Take::Now(Err(status)),
            Take::Later(take) => {
                let meter = self.meter.clone();
                Take::Later(Box::pin(async move {
                    let (value, step) = take.wait().await?;
                    brought(Held { value: ValueGuard::new(value), step }, key, meter).await
                }))
            }
        }
    }

    /// Takes the head of a set, once it is newer than `wanted`.
    fn head(&self, wanted: Wanted, name: &Arc<str>) -> Take<Taken, Taking> {
        if let Err(status) = self.values.sets.check_reader(name, &self.peer) {
            return Take::Now(Err(status));
        }
        self.unpin(name);
        if wanted == Wanted::Now {
            return Take::Now(self.values.head(name).map(Taken::Published));
        }
        // A neighbour views whole tensors, which costs less than deltas.
        if self.catalogue.is_none() {
            self.values.sets.note_follower(name);
        }
        let (values, name, meter, answers) =
            (self.values.clone(), name.clone(), self.meter.clone(), self.answers.clone());
        Take::Later(Box::pin(async move {
            let edition = values.heads.edition(&name, wanted, Some(&answers)).await?;
            meter.sends(edition.tensor.metadata().byte_length);
            Ok(Taken::Published(edition))
        }))
    }

    pub(super) fn set_content(&self, name: &Arc<str>, content: SetContent) -> Result<Edition, Status> {
        if content.edition == SET_LIST {
            return Ok(self.values.set_list(Some(&self.peer)));
        }
        self.values.sets.check_reader(name, &self.peer)?;
        let found = self.values.set_content(name, content);
        if content.is_last {
            self.unpin(name);
        } else if matches!(content.number, MANIFEST | MANIFEST_DELTA)
            || (self.catalogue.is_some() && !self.is_pinned(name))
        {
            // A neighbour to which the version is not lent asks for its contents after the loan, which ends the pin.
            self.pin(name, content.edition);
        }
        found
    }

    /// The peer begins to fetch a version of the set.
    fn pin(&self, name: &Arc<str>, edition: u64) {
        let version = self.values.sets.pin(name, edition);
        let pin = version.map(|version| Pin {
            values: self.values.clone(),
            set: name.clone(),
            version: Some(version),
        });
        let replaced = pin.and_then(|pin| self.pins().insert(name.clone(), pin));
        drop(replaced);
    }

    /// The peer needs no more of the version of the set that it has fetched.
    fn unpin(&self, name: &str) {
        let pin = self.pins().remove(name);
        drop(pin);
    }

    fn is_pinned(&self, name: &str) -> bool {
        self.pins().contains_key(name)
    }

    fn pins(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Pin>> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is at a place.
    pub(super) fn take_at(&self, scope: Scope, key: &Arc<str>) -> Take<Taken, Taking> {
        let take = match scope {
            Scope::Published | Scope::Versioned(Wanted::Now) => {
                Take::Now(self.published(key).map(Taken::Published))
            }
            Scope::Versioned(wanted) => Take::Later(self.newer(wanted, key)),
            Scope::Offered(offered) => Take::Now(self.offered(offered).map(Taken::Published)),
            Scope::Set(wanted) => self.head(wanted, key),
            Scope::SetContent(content) => Take::Now(self.set_content(key, content).map(Taken::Published)),
            Scope::Slice | Scope::SetSlice(_) => self.slice(scope, key),
            Scope::Pages(None) => Take::Now(self.pages(key)),
            Scope::Pages(Some(write)) => Take::Now(self.pages_of_write(write, key)),
            Scope::PageWrite(write) => self.page_write(key, write),
            Scope::Step(step) => self.of_step((step, false), key),
            Scope::StepNow(step) => self.of_step((step, true), key),
            // Their arguments are in the request.
            Scope::Call(_) | Scope::Arguments(_) => Take::Now(Err(Status::new(
                Code::InvalidArgument,
                "calls have no values that come one after the other",
            ))),
        };
        if let Take::Now(Ok(taken)) = &take {
            self.meter.sends(taken.tensor().metadata().byte_length);
        }
        take
    }

    /// Takes a published tensor, once it is newer than `wanted`.
    fn newer(&self, wanted: Wanted, name: &Arc<str>) -> Taking {
        let (values, name, meter) = (self.values.clone(), name.clone(), self.meter.clone());
        let (answers, catalogue) = (self.answers.clone(), self.catalogue.clone());
        Box::pin(async move {
            let edition = values.published.edition(&name, wanted, Some(&answers)).await?;
            if let Some(catalogue) = &catalogue {
                list(&values, catalogue, (&name, &edition));
            }
            meter.sends(edition.tensor.metadata().byte_length);
            Ok(Taken::Published(edition))
        })
    }
}

/// Has the peer read the published tensor by itself from now on, if `catalogue` has room for it.
fn list(values: &SharedValues, catalogue: &OfferedCatalogue, (name, edition): (&str, &Edition)) {
    if edition.listing == Listing::Unlisted {
        values.published.list(name, catalogue.catalogue());
    }
    share(catalogue, edition);
}

/// Has the peer map the memory of `edition`, unless the catalogue had no room for it or the cell has the content.
fn share(catalogue: &OfferedCatalogue, edition: &Edition) {
    if edition.listing != Listing::Refused && edition.tensor.bytes().len() > CELL_CONTENT_BYTES {
        catalogue.share(edition.tensor.buf());
    }
}

/// A value that is not in an answer yet, and goes back if this is dropped: before its step is let go, which an empty step
/// does not outlive.
struct Held {
    value: ValueGuard,
    step: StepRef,
}

/// The value, with a copy in host memory if it is elsewhere.
async fn brought(mut held: Held, key: Key, meter: Arc<Meter>) -> Result<Taken, Status> {
    held.value.bring_to_host(&key).await?;
    let (value, on_host) = held.value.hand_on().ok_or_else(dropped)?;
    let taken = Taken::Step { value, on_host: on_host.map(Box::new), step: held.step };
    meter.sends(taken.tensor().metadata().byte_length);
    Ok(taken)
}

pub(super) type Taking = BoxFuture<'static, Result<Taken, Status>>;

/// A value taken to answer one request.
#[derive(Debug)]
pub(crate) enum Taken {
    /// From the queue of a step.
    Step {
        value: TakenValue,
        /// The copy in host memory, if the value is in device memory.
        on_host: Option<Box<Tensor>>,
        /// A reference to the step, so that the value can be put back.
        step: StepRef,
    },
    /// A published or offered tensor, which stays so.
    Published(Edition),
    /// A slice, or tensors that travel together, gathered into one run of bytes.
    Gathered {
        tensor: Tensor,
        /// The next one is gathered when this is dropped.
        _turn: OwnedSemaphorePermit,
        /// What a call uses whose answer this is.
        _permits: Option<CallPermits>,
    },
    /// Pages of an arena, or tensors that travel together.
    Pages(AnswerPages),
}

impl Taken {
    /// Bytes that are published nowhere.
    pub(super) fn unnamed(bytes: &[u8]) -> Self {
        Self::Published(Edition::unnamed(0, encoded(bytes), Listing::Refused))
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        match self {
            Self::Step { value, on_host, .. } => on_host.as_deref().unwrap_or(&value.value.tensor),
            Self::Published(edition) => &edition.tensor,
            Self::Gathered { tensor, .. } => tensor,
            Self::Pages(pages) => &pages.described,
        }
    }
}

impl Source for PeerValues {
    type Bytes = Buf;
    type Taken = Taken;
    type Taking = Taking;

    fn take(&self, request: &TensorRequest) -> Take<Taken, Taking> {
        match request.scope {
            Scope::Call(terms) => self.call(terms, request),
            Scope::Arguments(number) => self.arguments(number),
            scope => self.take_at(scope, &request.key),
        }
    }

    fn subscribe(
        self: &Arc<Self>,
        place: (Scope, &Arc<str>),
        terms: SubscriptionTerms,
    ) -> BoxStream<'static, Result<Sequenced<Taken>, Status>> {
        self.subscribed(place, terms)
    }

    fn before_refusal(&self) -> Option<BoxFuture<'static, ()>> {
        self.refusals.turn()
    }

    fn metadata(taken: &Taken) -> &Metadata {
        taken.tensor().metadata()
    }

    fn bytes(taken: &Taken) -> Option<&Buf> {
        Some(taken.tensor().buf()).filter(|bytes| !bytes.is_empty())
    }

    fn pages(taken: &Taken) -> Option<Vec<(Buf, u64)>> {
        match taken {
            Taken::Pages(sent) => Some(sent.pages.clone()),
            _ => None,
        }
    }

    fn checksums(taken: &Taken) -> Option<Arc<Checksums>> {
        taken.tensor().checksums()
    }

    fn version(taken: &Taken) -> u64 {
        match taken {
            Taken::Step { .. } | Taken::Gathered { .. } | Taken::Pages(_) => 0,
            Taken::Published(edition) => edition.version,
        }
    }

    fn put_back(&self, taken: Taken) {
        if let Taken::Step { value, step: _step, .. } = taken {
            value.put_back();
        }
    }
}

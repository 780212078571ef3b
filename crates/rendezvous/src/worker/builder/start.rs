//! Starts a worker from its settings.

use std::sync::Arc;

use tensorwire_fabric::{Runtime, TokioRuntime};
use tensorwire_protocol::{DeviceName, InvalidDeviceName, wire::WireError};
use tokio::net::lookup_host;

use super::{DIAL_MAX, GIB, KEEPALIVE_MIN, LIVENESS_MIN, OpenedFabrics, WorkerBuilder};
use crate::{
    control::{
        ControlError, ControlPlane, GrpcConfig, GrpcPlane, Secret,
        cluster::normalise,
        name::{client_name, worker_name},
        secret::{read_secret_file, secret_from_environment},
    },
    error::WorkerError,
    peer_memory::pools::{PoolCaps, Pools},
    session::node::{Node, NodeSettings},
    values::{
        Values, arenas::Arenas, calls::Calls, lost_steps::LostSteps, offers::Offers, published::PublishedSet,
        sets::Sets, steps::StepTable,
    },
    worker::{Defaults, Worker, metrics::describe, store::local},
};

impl WorkerBuilder {
    pub(super) async fn start_within_limits(self) -> Result<Worker, WorkerError> {
        self.check_settings()?;
        let runtime = self.pick_runtime()?;
        let (name, device) = self.pick_name(&*runtime)?;
        let secret = self.pick_secret()?;
        let caps = PoolCaps {
            source_bytes: self.memory.source_bytes,
            receive_bytes: self.memory.receive_bytes,
            ring_bytes: GIB,
            message_bytes: GIB,
            bounce_bytes: self.memory.bounce_bytes,
            block_bytes: self.memory.block_bytes,
            huge_pages: self.memory.huge_pages,
        };
        let pools = Pools::new(caps, self.observer.as_ref())?;
        let (control, accept_secret) = self.pick_control(secret.clone()).await?;
        let opened = self.open_fabrics(&runtime, &pools, control.data_port().as_ref());
        let OpenedFabrics { usable: fabrics, unavailable } = opened?;
        let incarnation = runtime.random();
        let control_runtime = control.runtime().unwrap_or_else(|| runtime.clone());
        let values = Arc::new(Values {
            worker: name.clone(),
            device,
            incarnation,
            steps: StepTable::new(&name, self.limits.of_steps(self.duplicates), runtime.clone()),
            published: PublishedSet::new(incarnation),
            lost: LostSteps::default(),
            offers: Offers::new(incarnation),
            sets: Sets::new(incarnation, self.set_bytes.unwrap_or(self.memory.source_bytes)),
            heads: PublishedSet::new(incarnation),
            arenas: Arenas::default(),
            calls: Calls::new(self.limits.call_bytes, self.traces.trusting(self.trust)),
        });
        describe();
        let settings = NodeSettings {
            incarnation,
            address: control.local_address(),
            runtime,
            control_runtime: control_runtime.clone(),
            liveness: self.liveness,
            control,
            secret,
            accept_secret,
            fabrics,
            unavailable,
            pools,
            trust: self.trust,
            values,
            parameters: self.flow.parameters(self.validation),
            connect_limit: self.limit.min(DIAL_MAX),
            cluster: self.cluster,
            store_address: self.store_address.as_deref().map(normalise),
            name,
        };
        let node = Node::new(settings, self.limits.peers_max, self.limits.of_sessions());
        control_runtime.spawn("accept sessions", Box::pin(node.clone().accept_sessions()));
        let defaults = Defaults {
            sharing: self.sharing,
            limit: self.limit,
            proves_names: self.encryption.is_on(),
            grace: self.grace,
        };
        Ok(Worker::new(node, defaults))
    }

    /// The worker's name, as text and parsed.
    fn pick_name(&self, runtime: &dyn Runtime) -> Result<(String, DeviceName), WorkerError> {
        let name = match &self.name {
            Some(name) => worker_name(name).map_err(|remedy| config("name", name, &remedy))?,
            None => {
                let of_certificate = self.encryption.name(runtime.random() as u32)?;
                of_certificate.unwrap_or_else(|| client_name(runtime))
            }
        };
        self.encryption.check(&name)?;
        let device =
            name.parse().map_err(|error: InvalidDeviceName| config("name", &name, &error.to_string()))?;
        Ok((name, device))
    }

    fn check_settings(&self) -> Result<(), WorkerError> {
        self.flow.parameters(self.validation).check().map_err(|problem| match problem {
            WireError::OutOfRange { field, value, minimum, maximum } => {
                config(field, &value.to_string(), &format!("use {minimum} to {maximum}"))
            }
            other => config("parameters", "as set", &other.to_string()),
        })?;
        if self.liveness < LIVENESS_MIN {
            let remedy = "use at least 100 ms: otherwise a peer that is merely scheduled late counts as lost";
            return Err(config("liveness", &format!("{:?}", self.liveness), remedy));
        }
        self.check_not_zero()?;
        self.cluster.check()?;
        if self.fabrics.is_empty() && self.local_fabrics.is_none() {
            return Err(config(
                "fabrics",
                "none",
                "no tensor could be transferred: use one or more of shm, verbs and tcp",
            ));
        }
        Ok(())
    }

    fn check_not_zero(&self) -> Result<(), WorkerError> {
        let needed = [
            (
                "timeout",
                self.limit.is_zero(),
                "every operation would fail at once: use the longest wait you accept",
            ),
            ("sessions_max", self.limits.sessions_max == 0, "no peer could connect: use at least 1"),
            (
                "sessions_per_peer_max",
                self.limits.sessions_per_peer_max == 0,
                "no peer could connect: use at least 1",
            ),
            (
                "connections_per_peer_max",
                self.limits.connections_per_peer_max == 0,
                "no peer could connect: use at least 1",
            ),
            ("peers_max", self.limits.peers_max == 0, "no peer could connect: use at least 1"),
            ("values_max", self.limits.values_max == 0, "nothing could be sent: use at least 1"),
            (
                "deferred_steps_max",
                self.limits.deferred_steps_max == 0,
                "no receiver could request a value before its sender has begun the step: use at least 1",
            ),
            (
                "step_init_timeout",
                self.limits.step_init_timeout.is_zero(),
                "no receiver could request a value before its sender has begun the step: use the longest wait you accept",
            ),
            (
                "block_bytes",
                self.memory.block_bytes == 0,
                "memory is allocated in blocks: use 16777216, or at least 4096",
            ),
            (
                "source_bytes",
                self.memory.source_bytes == 0,
                "nothing could be published or sent: use at least block_bytes",
            ),
            (
                "receive_bytes",
                self.memory.receive_bytes == 0,
                "nothing could be received: use at least block_bytes",
            ),
            (
                "bounce_bytes",
                self.memory.bounce_bytes == 0,
                "nothing could be received: use at least the largest tensor's length",
            ),
        ];
        if let Some((field, _, remedy)) = needed.into_iter().find(|(_, is_zero, _)| *is_zero) {
            return Err(config(field, "0", remedy));
        }
        Ok(())
    }

    fn pick_runtime(&self) -> Result<Arc<dyn Runtime>, WorkerError> {
        let runtime: Arc<dyn Runtime> = match (&self.runtime, TokioRuntime::current()) {
            (Some(runtime), _) => runtime.clone(),
            (None, Some(runtime)) => {
                runtime.check_drivers().map_err(|why| config("runtime", "tokio", &why.to_string()))?;
                Arc::new(runtime)
            }
            (None, None) => {
                let remedy = "start the worker inside a tokio runtime, or give it one";
                return Err(config("runtime", "none", remedy));
            }
        };
        runtime.check_random().map_err(|error| {
            let remedy = format!(
                "it gives no random numbers, which secrets need ({error}): allow getrandom(2) to this process, or \
                 give it /dev/urandom"
            );
            config("runtime", &format!("{runtime:?}"), &remedy)
        })?;
        Ok(runtime)
    }

    fn pick_secret(&self) -> Result<Option<Secret>, WorkerError> {
        if let Some(secret) = &self.secret {
            return Ok(Some(secret.clone()));
        }
        if let Some(path) = &self.secret_file {
            return Ok(Some(read_secret_file(path)?));
        }
        Ok(if self.control.is_none() { secret_from_environment()? } else { None })
    }

    async fn pick_control(
        &self,
        secret: Option<Secret>,
    ) -> Result<(Arc<dyn ControlPlane>, Option<Secret>), WorkerError> {
        if let Some(control) = &self.control {
            let accept = match secret {
                Some(secret) => Some(secret),
                None => control.ambient_secret(&control.local_address()).await?,
            };
            return Ok((control.clone(), accept));
        }
        // HTTP/2's keepalive is for sessions that are not served yet; afterwards the worker's own pings decide earlier.
        let keepalive = self.liveness.max(KEEPALIVE_MIN);
        let address = self.address(secret.is_some()).await;
        let config = GrpcConfig::new(address).secret(secret).keepalive(keepalive, keepalive);
        // The kernel of a stopped process accepts the connection, so the limit is also for what the process answers.
        let config = config.congestion(self.congestion.clone()).dial_limit(self.liveness.min(DIAL_MAX));
        let plane =
            GrpcPlane::bind(self.encryption.of_plane(config)).map_err(|error| self.explained(error))?;
        let accept = plane.secret().cloned();
        Ok((Arc::new(plane), accept))
    }

    /// The address to listen on.
    async fn address(&self, has_secret: bool) -> String {
        let Some(address) = &self.store_address else { return self.bind.clone() };
        if has_secret || self.encryption.is_on() {
            return address.clone();
        }
        let found: Vec<_> = lookup_host(address).await.into_iter().flatten().collect();
        // Listening fails on an address of another machine.
        let Some(local) = local(address, &found) else { return address.clone() };
        if local != *address {
            log!(
                WARN,
                address,
                local,
                "ranks on other machines cannot reach the store: without a secret it is served on loopback"
            );
        }
        local
    }

    /// Adds the remedy if rank 0 cannot listen on the store's address.
    fn explained(&self, error: ControlError) -> ControlError {
        let Some(store) = &self.store_address else { return error };
        let why = match error {
            ControlError::Bind { detail, .. } => detail,
            // Only addresses of other machines need a secret here.
            ControlError::SecretNeeded { .. } => "this machine does not have that address".to_owned(),
            other => return other,
        };
        let detail = format!(
            "{why}; rank 0 serves the job's store there: give an address of its machine, and each job a port of its own"
        );
        ControlError::Bind { address: store.clone(), detail }
    }
}

pub(super) fn config(field: &'static str, value: &str, remedy: &str) -> WorkerError {
    WorkerError::Config { field, value: value.to_owned(), remedy: remedy.to_owned() }
}

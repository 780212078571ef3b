//! A worker's way to one server.

use futures::future::try_join;
use tensorwire::{Peer, Step, Tensor, Worker};
use tensorwire_examples::shards::Piece;

use crate::{
    failure::Failure,
    link::{Keys, Push, Token, wire_shape},
    options::RoleName,
};

/// One server, in one life of the worker.
#[derive(Debug)]
pub(crate) struct ServerLink {
    peer: Peer,
    life: Step,
    keys: Keys,
    pieces: Vec<Piece>,
}

impl ServerLink {
    /// The way of worker `index` to `server`, which has `pieces`. Does not connect yet.
    pub(crate) fn new(
        worker: &Worker,
        life: &Step,
        server: usize,
        index: usize,
        pieces: &[Piece],
    ) -> Result<Self, Failure> {
        let peer = worker.peer(&RoleName::Server(server).worker_name())?;
        let keys = Keys::new(worker, server, index, pieces)?;
        Ok(Self { peer, life: life.clone(), keys, pieces: pieces.to_vec() })
    }

    /// The server's next word. Waits until this worker may go on.
    pub(crate) async fn token(&self) -> Result<Token, Failure> {
        Token::from_tensor(&self.life.recv(&self.keys.token).await?, self.peer.name())
    }

    /// Sends what comes first of a push. Never waits: the server takes it when it is ready.
    pub(crate) fn push(&self, worker: &Worker, push: Push) -> Result<(), Failure> {
        Ok(self.life.send(&self.keys.push, push.to_tensor(worker.pool())?)?)
    }

    /// Sends the server's part of `gradients`.
    pub(crate) fn push_gradients(
        &self,
        worker: &Worker,
        push: Push,
        gradients: &[Vec<f32>],
    ) -> Result<(), Failure> {
        self.push(worker, push)?;
        self.send(worker, &self.keys.gradients, gradients)
    }

    /// Sends the server's part of the parameters and velocities it is to begin with.
    pub(crate) fn push_checkpoint(
        &self,
        worker: &Worker,
        push: Push,
        parameters: &[Vec<f32>],
        velocities: &[Vec<f32>],
    ) -> Result<(), Failure> {
        self.push(worker, push)?;
        self.send(worker, &self.keys.parameters, parameters)?;
        self.send(worker, &self.keys.velocities, velocities)
    }

    fn send(&self, worker: &Worker, keys: &[tensorwire::Key], whole: &[Vec<f32>]) -> Result<(), Failure> {
        for (key, piece) in keys.iter().zip(&self.pieces) {
            let values = &whole[piece.tensor][piece.elements.clone()];
            self.life.send(key, Tensor::from_values(worker.pool(), &wire_shape(piece), values)?)?;
        }
        Ok(())
    }

    /// Fetches what the server has published of each piece under `name`.
    pub(crate) async fn fetch(
        &self,
        worker: &Worker,
        name: impl Fn(&Piece) -> String,
    ) -> Result<Vec<Tensor>, Failure> {
        let names: Vec<String> = self.pieces.iter().map(name).collect();
        Ok(worker.fetch_many(&self.peer, &names).await?)
    }

    /// Fetches two things of each piece.
    pub(crate) async fn fetch_both(
        &self,
        worker: &Worker,
        first: impl Fn(&Piece) -> String,
        second: impl Fn(&Piece) -> String,
    ) -> Result<(Vec<Tensor>, Vec<Tensor>), Failure> {
        try_join(self.fetch(worker, first), self.fetch(worker, second)).await
    }

    /// Puts what was fetched to its place among all tensors.
    pub(crate) fn unpack(&self, fetched: &[Tensor], whole: &mut [Vec<f32>]) -> Result<(), Failure> {
        unpack(&self.pieces, fetched, whole).map_err(|problem| {
            let from = self.peer.name().to_owned();
            Failure::Message { from, problem }
        })
    }
}

/// Puts the values of `pieces` to their places in `whole`.
pub(crate) fn unpack(pieces: &[Piece], fetched: &[Tensor], whole: &mut [Vec<f32>]) -> Result<(), String> {
    for (piece, tensor) in pieces.iter().zip(fetched) {
        let values = tensor.values::<f32>().map_err(|error| error.to_string())?;
        let place = &mut whole[piece.tensor][piece.elements.clone()];
        if values.len() != place.len() {
            return Err(format!("{tensor:?} came for {}, which is {:?}", piece.name, piece.shape));
        }
        place.copy_from_slice(&values);
    }
    Ok(())
}

//! Slices of tensors that a peer requests.

use std::sync::Arc;

use tensorwire_protocol::{
    Code, Scope, Status, Take,
    slice::{InvalidSlice, Slice},
};

use crate::{
    connection::peer_values::{PeerValues, Taken, Taking},
    values::{catalogue::Listing, cut::Cut, published::Edition},
};

impl PeerValues {
    /// Takes the slice that `key` names.
    pub(super) fn slice(&self, scope: Scope, key: &Arc<str>) -> Take<Taken, Taking> {
        let cut = match self.cut(scope, key) {
            Ok(cut) => cut,
            Err(status) => return Take::Now(Err(status)),
        };
        if let Some(tensor) = cut.shared() {
            let edition = Edition::unnamed(0, tensor, Listing::Refused);
            return Take::Now(Ok(Taken::Published(edition)));
        }
        let (gathering, meter) = (self.gathering.clone(), self.meter.clone());
        Take::Later(Box::pin(async move {
            let (tensor, turn) = gathering.gathered(cut).await?;
            meter.sends(tensor.metadata().byte_length);
            Ok(Taken::Gathered { tensor, _turn: turn, _permits: None })
        }))
    }

    fn cut(&self, scope: Scope, key: &str) -> Result<Cut, Status> {
        let invalid = |error: InvalidSlice| Status::new(Code::InvalidArgument, error.to_string());
        let (name, slice) = Slice::split(key).map_err(invalid)?;
        let whole = match scope {
            Scope::SetSlice(content) => self.set_content(&Arc::from(name), content)?,
            _ => self.values.published(name)?,
        };
        Cut::new(&whole.tensor, &slice).map_err(invalid)
    }
}

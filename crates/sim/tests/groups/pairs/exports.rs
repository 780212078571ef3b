//! Memory that all ranks read and write by a key.

use tensorwire_collective::{GroupError, pair::ExportKey};
use tensorwire_rendezvous::Tensor;
use tensorwire_sim::Rng;

use super::life::Life;

/// The tag of keys, and the tag under which a rank sends its progress.
const KEYS: u64 = 100;
const DONE: u64 = 101;

/// Bytes of each rank's part of an export of `owner`: what travels in a message, or more.
fn part_of(owner: usize) -> usize {
    if owner.is_multiple_of(2) { 24 } else { 4096 }
}

/// Writes of each rank to each export.
const WRITES: u8 = 4;

impl Life {
    /// Exports memory of this rank until all others have finished with it.
    pub(super) async fn export(&self) {
        let size = self.group.size();
        let mut rng = self.private([9]);
        let export = match self.group.export(self.tensor(&vec![0u8; size * part_of(self.own())])) {
            Ok(export) => export,
            Err(error) => return self.explain("export", &[self.own()], &error),
        };
        let key = export.key().encode();
        for to in 0..size {
            self.tell(to, KEYS, &key);
        }
        for from in 0..size {
            let Some(done) = self.told(&mut rng, from, DONE).await else { continue };
            let [least, most] = done.bytes()[..] else {
                return self.fail_data(&format!("{done:?} of {from}"));
            };
            let content = export.tensor().unwrap();
            if self
                .version(from, content.bytes(), part_of(self.own()))
                .is_none_or(|version| version < least || version > most)
            {
                let what = format!("the part of {from} is {:?}, not {least} to {most}", content.bytes());
                self.fail_data(&what);
            }
        }
    }

    pub(super) async fn use_export(&self, owner: usize) {
        let mut rng = self.private([10, owner]);
        let Some(key) = self.told(&mut rng, owner, KEYS).await else { return };
        let key = ExportKey::decode(key.bytes()).unwrap();
        let mut seen = vec![0; self.group.size()];
        let mut least = 0;
        let mut held: Option<(Tensor, Vec<u8>)> = None;
        for version in 1..=WRITES {
            self.pause(&mut rng).await;
            let bytes = vec![version; part_of(owner)];
            let put = self.group.put(&key, self.own() * bytes.len(), &bytes);
            // A cancelled one may take effect later, or not.
            if let Some(Ok(())) = self.wait(&mut rng, "put", &[owner], put).await {
                least = version;
                self.books().reached.written += 1;
            }
            if let Some((read, bytes)) = held.take_if(|_| rng.chance(1, 2))
                && read.bytes() != bytes
            {
                self.fail_data(&format!("what was read of {owner} has changed from {bytes:?} to {read:?}"));
            }
            seen[self.own()] = seen[self.own()].max(least);
            match self.read(&mut rng, owner, &key, &mut seen).await {
                Ok(read) => held = held.or(read.map(|read| (read.clone(), read.bytes().to_vec()))),
                Err(_) => break,
            }
        }
        self.tell(owner, DONE, &[least, WRITES]);
    }

    /// Reads all of an export: the parts of all ranks are whole, and never older than in an earlier read.
    async fn read(
        &self,
        rng: &mut Rng,
        owner: usize,
        key: &ExportKey,
        seen: &mut [u8],
    ) -> Result<Option<Tensor>, GroupError> {
        let Some(read) = self.wait(rng, "get", &[owner], self.group.get(key, ..)).await else {
            return Ok(None);
        };
        let read = read?;
        self.books().reached.read += 1;
        for (rank, seen) in seen.iter_mut().enumerate() {
            match self.version(rank, read.bytes(), part_of(owner)) {
                Some(version) if version >= *seen => *seen = version,
                _ => self.fail_data(&format!("export of {owner}: {:?} after {seen} of {rank}", read.bytes())),
            }
        }
        Ok(Some(read))
    }

    /// The version of a rank's part, if that is whole.
    fn version(&self, rank: usize, content: &[u8], bytes: usize) -> Option<u8> {
        let part = content.get(rank * bytes..(rank + 1) * bytes)?;
        part.iter().all(|byte| *byte == part[0]).then_some(part[0])
    }

    pub(super) fn tell(&self, to: usize, tag: u64, bytes: &[u8]) {
        match self.group.send(to, tag, self.tensor(bytes)) {
            Ok(sent) => drop(sent),
            Err(error) => self.explain("tell", &[to], &error),
        }
    }

    async fn told(&self, rng: &mut Rng, from: usize, tag: u64) -> Option<Tensor> {
        loop {
            let message = self.wait(rng, "be told", &[from], self.group.recv(from, tag)).await;
            if let Some(message) = message {
                return Some(message.ok()?.tensor);
            }
        }
    }
}

//! What an earlier pull has left in the output, by the server's checksums.

use std::{hash::Hasher, sync::Arc};

use crate::{failure::Failure, layout::Piece, output::Target, plan::Plan, separate_thread::in_thread};

/// Bytes that are read at once.
const STEP_BYTES: usize = 1 << 20;

/// The tensors of the plan, by their indexes, that the output does not have yet; and the output.
pub(crate) async fn wanted(
    plan: &Arc<Plan>,
    output: Option<Target>,
) -> Result<(Option<Target>, Vec<usize>), Failure> {
    let all = 0..plan.layout.pieces.len();
    match output {
        Some(target) if target.had_content() => {
            let plan = plan.clone();
            in_thread(move || {
                let wanted = all.filter(|&at| !has(&target, &plan.layout.pieces[at], plan.checksums[at]));
                let wanted = wanted.collect();
                Ok((Some(target), wanted))
            })
            .await
        }
        output => Ok((output, all.collect())),
    }
}

/// Whether the output has the bytes of this checksum in the tensor's place. Bytes that cannot be read are fetched.
fn has(target: &Target, piece: &Piece, checksum: Option<u64>) -> bool {
    let Some(checksum) = checksum else { return false };
    let mut hasher = twox_hash::XxHash3_64::with_seed(0);
    let mut buffer = vec![0; STEP_BYTES];
    let mut done = 0;
    while done < piece.bytes {
        let length = usize::try_from(piece.bytes - done).unwrap_or(STEP_BYTES).min(STEP_BYTES);
        if target.read_at(piece.file, &mut buffer[..length], piece.place + done).is_err() {
            return false;
        }
        hasher.write(&buffer[..length]);
        done += length as u64;
    }
    hasher.finish() == checksum
}

//! Which server holds what: parameters divided by their size.

use std::{cmp::Reverse, ops::Range};

use crate::mlp::TensorSpec;

/// A tensor, or some rows of one, that lies on one server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// `w1`, or `w1[0..32]` for some of its rows.
    pub name: String,
    /// The tensor's place among all.
    pub tensor: usize,
    /// Where the piece lies in the tensor, in elements.
    pub elements: Range<usize>,
    /// Its own shape.
    pub shape: Vec<usize>,
}

/// The pieces of each of `servers` servers: the same ones in every process that asks.
///
/// Between several servers, a tensor that is larger than a quarter of a fair share is cut into pieces of rows. Then, from the largest piece to the smallest,
/// each goes to the server that has least so far (of equals, the first).
pub fn divide(tensors: &[TensorSpec], servers: usize) -> Vec<Vec<Piece>> {
    let servers = servers.max(1);
    let total: usize = tensors.iter().map(TensorSpec::elements).sum();
    let most = if servers == 1 { total } else { total.div_ceil(4 * servers) };
    let mut pieces: Vec<Piece> =
        tensors.iter().enumerate().flat_map(|(index, tensor)| cut(index, tensor, most)).collect();
    // Stable, so that equals keep their order.
    pieces.sort_by_key(|piece| Reverse(piece.elements.len()));
    let mut shards = vec![Vec::new(); servers];
    let mut loads = vec![0; servers];
    for piece in pieces {
        let least = (0..servers).min_by_key(|&server| loads[server]).unwrap_or(0);
        loads[least] += piece.elements.len();
        shards[least].push(piece);
    }
    for shard in &mut shards {
        shard.sort_by_key(|piece| (piece.tensor, piece.elements.start));
    }
    shards
}

/// The tensor whole, or in about equal pieces of whole rows, none larger than `most` elements unless a row is.
fn cut(index: usize, tensor: &TensorSpec, most: usize) -> Vec<Piece> {
    let elements = tensor.elements();
    let rows = tensor.shape.first().copied().unwrap_or(1);
    if elements <= most || rows < 2 {
        let whole = Piece {
            name: tensor.name.clone(),
            tensor: index,
            elements: 0..elements,
            shape: tensor.shape.clone(),
        };
        return vec![whole];
    }
    let row = elements / rows;
    let pieces = elements.div_ceil(most).min(rows);
    let boundary = |piece: usize| rows * piece / pieces;
    let piece = |number: usize| {
        let rows = boundary(number)..boundary(number + 1);
        let mut shape = tensor.shape.clone();
        shape[0] = rows.len();
        let name = format!("{}[{}..{}]", tensor.name, rows.start, rows.end);
        Piece { name, tensor: index, elements: rows.start * row..rows.end * row, shape }
    };
    (0..pieces).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::{Piece, divide};
    use crate::mlp::{Mlp, TensorSpec};

    fn elements(shard: &[Piece]) -> usize {
        shard.iter().map(|piece| piece.elements.len()).sum()
    }

    #[test]
    fn every_element_lies_on_one_server() {
        let tensors = Mlp::for_digits().tensors();
        for servers in 1..=7 {
            let mut pieces: Vec<Piece> = divide(&tensors, servers).into_iter().flatten().collect();
            pieces.sort_by_key(|piece| (piece.tensor, piece.elements.start));
            let (mut tensor, mut next) = (0, 0);
            for piece in &pieces {
                if piece.tensor != tensor {
                    assert_eq!((next, piece.tensor), (tensors[tensor].elements(), tensor + 1));
                    (tensor, next) = (piece.tensor, 0);
                }
                assert_eq!(piece.elements.start, next, "{piece:?}");
                assert_eq!(piece.shape.iter().product::<usize>(), piece.elements.len());
                next = piece.elements.end;
            }
            assert_eq!((tensor, next), (5, 10));
        }
    }

    #[test]
    fn servers_have_about_the_same_size() {
        let tensors = Mlp::for_digits().tensors();
        for servers in 2..=4 {
            let sizes: Vec<usize> = divide(&tensors, servers).iter().map(|shard| elements(shard)).collect();
            let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
            assert!(most * 100 <= least * 115, "{sizes:?}");
        }
    }

    #[test]
    fn one_server_has_whole_tensors_and_scalars_stay_whole() {
        let tensors = Mlp::for_digits().tensors();
        let names: Vec<String> = divide(&tensors, 1).remove(0).into_iter().map(|piece| piece.name).collect();
        assert_eq!(names, ["w1", "b1", "w2", "b2", "w3", "b3"]);
        let scalars = ["a", "b"].map(|name| TensorSpec { name: name.to_owned(), shape: Vec::new() });
        let shards = divide(&scalars, 3);
        assert_eq!(shards.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 0]);
    }
}

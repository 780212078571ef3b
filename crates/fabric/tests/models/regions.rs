//! The cache of the peer's regions, which threads read and fill concurrently.

use loom::{sync::Arc, thread};

use crate::{model, noted::Noted};

#[test]
fn noted_words_are_read_whole_whoever_notes_others_meanwhile() {
    model(|| {
        let noted = Arc::new(Noted::new());
        noted.note([1, 11]);
        let writers: Vec<_> = (2..=3)
            .map(|number| {
                let noted = noted.clone();
                thread::spawn(move || noted.note([number, 10 + number]))
            })
            .collect();
        if let Some([first, second]) = noted.read() {
            assert_eq!(second, 10 + first);
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let last = noted.read().unwrap();
        assert!(last == [2, 12] || last == [3, 13], "one of the two noted its words: {last:?}");
    });
}

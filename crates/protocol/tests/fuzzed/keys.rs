//! A text is a key, a device name, a slice or a list of pages, or is refused. A parsed one prints the text that it was parsed from.

use tensorwire_protocol::{DeviceName, Key, pages::PageMoves, slice::Slice};

pub(crate) fn keys(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    key(text);
    device(text);
    slice(text);
    pages(text);
}

fn slice(text: &str) {
    let Ok((name, slice)) = Slice::split(text) else { return };
    assert_eq!(format!("{name}{slice}"), text);
    let ends: Vec<_> = slice.ranges().iter().map(|range| range.end).collect();
    for run in slice.runs(&ends).take(99) {
        assert!(run.start <= run.end);
    }
}

fn pages(text: &str) {
    let Ok((name, moves)) = PageMoves::split(text) else { return };
    assert_eq!(format!("{name}{moves}"), text);
    assert_eq!(PageMoves::new(moves.as_slice().iter().copied()), Ok(moves));
}

fn key(text: &str) {
    let Ok(key) = Key::parse(text) else { return };
    assert_eq!((key.as_str(), key.to_string().as_str()), (text, text));
    assert_eq!(Key::parse(key.as_str()), Ok(key.clone()));
    let moved = key.with_incarnation(!key.incarnation());
    assert_eq!(moved.incarnation(), !key.incarnation());
    assert_eq!(moved.table_key(), key.table_key());
    assert_eq!(moved.source_device(), key.source_device());
    assert_eq!(moved.destination_device(), key.destination_device());
    let built = Key::builder()
        .source(key.source())
        .incarnation(key.incarnation())
        .destination(key.destination())
        .edge(key.edge())
        .build()
        .unwrap();
    assert_eq!((built.source(), built.edge()), (key.source(), key.edge()));
    device(key.source());
    device(key.destination());
}

fn device(text: &str) {
    let Ok(name) = DeviceName::parse(text) else { return };
    assert_eq!(DeviceName::parse(&name.to_string()), Ok(name.clone()), "{name}");
    if let Some((worker, local)) = name.split() {
        assert_eq!(DeviceName::parse(&format!("{worker}/device:{local}")), Ok(name.clone()));
    }
    if let Some(worker) = name.worker() {
        assert!(DeviceName::parse(&worker).unwrap().is_same_address_space(&name));
    }
}

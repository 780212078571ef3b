
/// Whether mutant `number` is switched on in this process. If `TENSORWIRE_MUTANTS_REACHED` names a file, also records
/// there that the mutant was reached. Only the copy of the sources that `scripts/mutants` builds contains this
/// function.
#[doc(hidden)]
pub fn mutant(number: usize) -> bool {
    use std::{
        fs::{File, OpenOptions},
        io::Write,
        sync::{
            OnceLock,
            atomic::{AtomicBool, Ordering},
        },
    };

    const MOST: usize = 1 << 16;
    static REACHED: [AtomicBool; MOST] = [const { AtomicBool::new(false) }; MOST];
    static PLAN: OnceLock<(Option<usize>, Option<File>)> = OnceLock::new();
    let (chosen, notes) = PLAN.get_or_init(|| {
        let chosen = std::env::var("TENSORWIRE_MUTANT").ok().and_then(|number| number.parse().ok());
        let notes = std::env::var_os("TENSORWIRE_MUTANTS_REACHED");
        (chosen, notes.and_then(|path| OpenOptions::new().append(true).create(true).open(path).ok()))
    });
    if let Some(mut notes) = notes.as_ref()
        && !REACHED[number % MOST].swap(true, Ordering::Relaxed)
    {
        let _ = notes.write_all(format!("{number}\n").as_bytes());
    }
    *chosen == Some(number)
}

//! The faults of a run, as data: drawn from the seed in advance, printed in reports, and parsed from there.

use std::{fmt, str::FromStr, time::Duration};

use crate::fault::Call;

/// A fault that a scenario injects. Members are named by their index in the scenario, since a restart makes another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disturbance {
    /// The process dies, and is started again after this time.
    Crash(usize, Duration),
    /// [`Fault::LoseLink`](crate::Fault::LoseLink).
    LoseLink(usize, usize),
    /// [`Fault::LoseControl`](crate::Fault::LoseControl).
    LoseControl(usize, usize),
    /// [`Fault::HalfOpen`](crate::Fault::HalfOpen).
    HalfOpen(usize, usize),
    /// [`Fault::Slow`](crate::Fault::Slow).
    Slow(usize),
    /// [`Fault::Pause`](crate::Fault::Pause).
    Pause(usize, Duration),
    /// A call fails once, after this many of its kind.
    Fail(usize, Call, u64),
    /// This many of 65,536 pieces of contents arrive with a bit flipped.
    Flip(u32),
    /// The liveness phase begins: [`Fault::Heal`](crate::Fault::Heal).
    Heal,
}

/// One disturbance and when it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The round of the scenario.
    pub round: u32,
    /// Number of events since the round began; 0 is before its first event.
    pub after: u64,
    /// What happens.
    pub what: Disturbance,
}

/// All that one run injects. `Display` and `FromStr` are each other's inverse.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// In any order.
    pub entries: Vec<Entry>,
}

/// A text that is not a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no entry of a plan: write them as `0@512 crash 1 40ms, 1@7 pause 2 90000000us, 0@0 fail 1 post 37`"
)]
pub struct BadPlan(String);

impl Plan {
    /// The entries of one round.
    pub fn of_round(&self, round: u32) -> Vec<Entry> {
        self.entries.iter().filter(|entry| entry.round == round).copied().collect()
    }
}

impl Entry {
    /// Milder or earlier forms of this entry, which are simpler to read. Empty when it is as mild as possible.
    pub fn milder(&self) -> Vec<Self> {
        let shorter = |length: Duration| (length > Duration::from_micros(10)).then(|| length / 4);
        let micros = |length: Duration| Duration::from_micros(length.as_micros() as u64);
        let what = match self.what {
            Disturbance::Crash(place, pause) => {
                (!pause.is_zero()).then_some(Disturbance::Crash(place, Duration::ZERO))
            }
            Disturbance::HalfOpen(one, other) => Some(Disturbance::LoseLink(one, other)),
            Disturbance::Pause(place, length) => {
                shorter(length).map(|length| Disturbance::Pause(place, micros(length)))
            }
            Disturbance::Fail(place, call, successes) => {
                (successes > 0).then_some(Disturbance::Fail(place, call, successes / 2))
            }
            Disturbance::Flip(of_65536) => (of_65536 > 1).then_some(Disturbance::Flip(of_65536 / 4 + 1)),
            _ => None,
        };
        let what = what.filter(|what| *what != self.what).map(|what| Self { what, ..*self });
        let sooner = (self.after > 1).then_some(Self { after: self.after / 2, ..*self });
        what.into_iter().chain(sooner).collect()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, entry) in self.entries.iter().enumerate() {
            write!(f, "{}{entry}", if number > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{} ", self.round, self.after)?;
        match self.what {
            Disturbance::Crash(place, pause) => write!(f, "crash {place} {}us", pause.as_micros()),
            Disturbance::LoseLink(one, other) => write!(f, "lose-link {one} {other}"),
            Disturbance::LoseControl(one, other) => write!(f, "lose-control {one} {other}"),
            Disturbance::HalfOpen(one, other) => write!(f, "half-open {one} {other}"),
            Disturbance::Slow(place) => write!(f, "slow {place}"),
            Disturbance::Pause(place, length) => write!(f, "pause {place} {}us", length.as_micros()),
            Disturbance::Fail(place, call, successes) => {
                write!(f, "fail {place} {} {successes}", name_of(call))
            }
            Disturbance::Flip(of_65536) => write!(f, "flip {of_65536}"),
            Disturbance::Heal => write!(f, "heal"),
        }
    }
}

const CALLS: [(Call, &str); 4] = [
    (Call::Register, "register"),
    (Call::Prepare, "prepare"),
    (Call::Post, "post"),
    (Call::Allocate, "allocate"),
];

fn name_of(call: Call) -> &'static str {
    CALLS.iter().find(|(known, _)| *known == call).map_or("?", |(_, name)| name)
}

impl FromStr for Plan {
    type Err = BadPlan;

    fn from_str(text: &str) -> Result<Self, BadPlan> {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        let entries = parts.map(|part| entry(part).ok_or_else(|| BadPlan(part.to_owned())));
        Ok(Self { entries: entries.collect::<Result<_, _>>()? })
    }
}

fn entry(text: &str) -> Option<Entry> {
    let mut words = text.split_whitespace();
    let (round, after) = words.next()?.split_once('@')?;
    let verb = words.next()?;
    let arguments: Vec<&str> = words.collect();
    let number = |index: usize| arguments.get(index)?.parse::<u64>().ok();
    let place = |index: usize| number(index).and_then(|place| usize::try_from(place).ok());
    let length = |index: usize| arguments.get(index).and_then(|text| duration(text));
    let (what, count) = match verb {
        "crash" => (Disturbance::Crash(place(0)?, length(1)?), 2),
        "lose-link" => (Disturbance::LoseLink(place(0)?, place(1)?), 2),
        "lose-control" => (Disturbance::LoseControl(place(0)?, place(1)?), 2),
        "half-open" => (Disturbance::HalfOpen(place(0)?, place(1)?), 2),
        "slow" => (Disturbance::Slow(place(0)?), 1),
        "pause" => (Disturbance::Pause(place(0)?, length(1)?), 2),
        "fail" => {
            let (call, _) = CALLS.iter().find(|(_, name)| Some(name) == arguments.get(1))?;
            (Disturbance::Fail(place(0)?, *call, number(2)?), 3)
        }
        "flip" => (Disturbance::Flip(u32::try_from(number(0)?).ok()?), 1),
        "heal" => (Disturbance::Heal, 0),
        _ => return None,
    };
    let (round, after) = (round.parse().ok()?, after.parse().ok()?);
    (arguments.len() == count).then_some(Entry { round, after, what })
}

/// Of whole milliseconds or microseconds.
fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(2)?)?;
    let number = number.parse().ok()?;
    match unit {
        "us" => Some(Duration::from_micros(number)),
        "ms" => Some(Duration::from_millis(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Plan {
        let micros = Duration::from_micros;
        let kinds = [
            Disturbance::Crash(1, micros(40)),
            Disturbance::LoseLink(0, 2),
            Disturbance::LoseControl(2, 0),
            Disturbance::HalfOpen(1, 0),
            Disturbance::Slow(2),
            Disturbance::Pause(0, micros(90_000_000)),
            Disturbance::Flip(300),
            Disturbance::Heal,
        ];
        let calls = CALLS.map(|(call, _)| Disturbance::Fail(1, call, 37));
        let numbered = kinds.into_iter().chain(calls).enumerate();
        let entries =
            numbered.map(|(number, what)| Entry { round: number as u32 % 2, after: number as u64, what });
        Plan { entries: entries.collect() }
    }

    #[test]
    fn what_is_printed_reads_back_the_same() {
        assert_eq!(all().to_string().parse(), Ok(all()));
        assert_eq!(Plan::default().to_string(), "");
        assert_eq!("".parse(), Ok(Plan::default()));
        let milliseconds: Plan = " 3@7  pause 1 20ms ,".parse().unwrap();
        assert_eq!(milliseconds.to_string(), "3@7 pause 1 20000us");
    }

    #[test]
    fn what_is_no_plan_is_named() {
        for text in
            ["crash 1", "0@1 crash 1", "0@1 crash 1 4", "0@1 heal 1", "0@x heal", "0@1 fail 1 sing 2", "1@2"]
        {
            let error = text.parse::<Plan>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("`{text}` is no entry")), "{error}");
        }
    }

    #[test]
    fn every_entry_gets_milder_until_it_cannot() {
        for mut entry in all().entries {
            let mut steps = 0;
            while let Some(milder) = entry.milder().into_iter().next() {
                assert_ne!(milder, entry);
                entry = milder;
                steps += 1;
                assert!(steps < 100, "{entry}");
            }
        }
    }
}

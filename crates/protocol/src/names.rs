//! Keys travel once: the requester gives a key a number with the first request for it, and later requests carry the
//! number. Only in mode counted.
//!
//! The numbers belong to one connection and one direction. There are as many as was agreed
//! ([`Agreed::names_max`](crate::Agreed::names_max)), most of them for short keys only; when all are given out, the next
//! new key takes the number that was given longest ago. That is safe with requests in flight: a request's key is looked
//! up when its message is read, and messages are read in order. The step is not part of a name, since it changes all
//! the time.

use std::{collections::HashMap, sync::Arc};

use crate::{
    Metadata,
    key::KeyHash,
    limits::{LONG_NAMES_MAX, NAMED_BYTES_MAX},
    repeated::Repeated,
};

/// How a request names its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameForm {
    /// The key itself, which gets no number.
    Plain,
    /// The key itself, which has this number from now on.
    Define(u16),
    /// The key's number.
    Number(u16),
}

/// A number that was given to a key.
#[derive(Debug, PartialEq, Eq)]
pub struct Defined {
    number: u16,
    /// The key that had the number before.
    before: Option<Arc<str>>,
}

/// The numbers that the requester has given out.
#[derive(Debug)]
pub struct Names {
    most: usize,
    numbers: HashMap<Arc<str>, u16, KeyHash>,
    /// The key of each number.
    keys: Vec<Arc<str>>,
    /// The number that is given next.
    next: usize,
    /// The number that was looked up last.
    latest: u16,
}

impl Names {
    /// Without any key, for at most `most` of them.
    pub fn new(most: u32) -> Self {
        Self { most: bounded(most), numbers: HashMap::default(), keys: Vec::new(), next: 0, latest: 0 }
    }

    /// Numbers that no key has had yet.
    pub(crate) fn unassigned(&self) -> usize {
        self.most - self.keys.len()
    }

    /// The number of `key`, if it has one. The previous request's key, and keys in the order in which they got their numbers, are
    /// found without a hash.
    fn number(&mut self, key: &Arc<str>) -> Option<u16> {
        let is_at = |number: &u16| {
            self.keys.get(usize::from(*number)).is_some_and(|numbered| Arc::ptr_eq(numbered, key))
        };
        let guesses = [self.latest, self.latest.wrapping_add(1)];
        let number = guesses.into_iter().find(is_at).or_else(|| self.numbers.get(key).copied())?;
        self.latest = number;
        Some(number)
    }

    /// The form in which a request names `key` now.
    pub fn form(&mut self, key: &Arc<str>) -> NameForm {
        match (self.number(key), u16::try_from(self.next)) {
            (Some(number), _) => NameForm::Number(number),
            (None, Ok(next)) if self.most > 0 && may_have(next, key) => NameForm::Define(next),
            _ => NameForm::Plain,
        }
    }

    /// Records that a request names `key` in this form, which [`form`](Self::form) returned last. If that gives the key a number,
    /// returns what [`take_back`](Self::take_back) needs.
    pub fn named(&mut self, key: &Arc<str>, form: NameForm) -> Option<Defined> {
        let NameForm::Define(number) = form else { return None };
        let before = match self.keys.get_mut(usize::from(number)) {
            Some(place) => {
                self.numbers.remove(place);
                Some(std::mem::replace(place, key.clone()))
            }
            None => {
                self.keys.push(key.clone());
                None
            }
        };
        self.numbers.insert(key.clone(), number);
        self.next = if self.next + 1 < self.most { self.next + 1 } else { 0 };
        Some(Defined { number, before })
    }

    /// Undoes the latest [`named`](Self::named), because its request is not posted.
    pub fn take_back(&mut self, defined: Defined) {
        let Defined { number, before } = defined;
        self.next = number.into();
        let Some(place) = self.keys.get_mut(usize::from(number)) else { return };
        self.numbers.remove(place);
        match before {
            Some(key) => {
                *place = key.clone();
                self.numbers.insert(key, number);
            }
            None => drop(self.keys.pop()),
        }
    }
}

/// The key of each of the peer's numbers.
#[derive(Debug)]
pub struct NameTable {
    most: usize,
    keys: Vec<Option<Arc<str>>>,
    /// The known metadata of requests.
    pub(crate) known: Repeated<Arc<[Metadata]>>,
    /// The metadata of META_DATA_RESPONSE.
    pub(crate) described: Repeated<Metadata>,
}

impl NameTable {
    /// Without any key, for at most `most` of them.
    pub fn new(most: u32) -> Self {
        Self {
            most: bounded(most),
            keys: Vec::new(),
            known: Repeated::default(),
            described: Repeated::default(),
        }
    }

    /// Assigns `number` to `key`; false if there is no such number, or the key is too long for it.
    pub fn define(&mut self, number: u16, key: Arc<str>) -> bool {
        let is_allowed = may_have(number, &key);
        let number = usize::from(number);
        if number >= self.most || !is_allowed {
            return false;
        }
        if number >= self.keys.len() {
            self.keys.resize(number + 1, None);
        }
        if let Some(place) = self.keys.get_mut(number) {
            *place = Some(key);
        }
        true
    }

    /// The key that `number` is assigned to, if any.
    pub fn get(&self, number: u16) -> Option<Arc<str>> {
        self.keys.get(usize::from(number))?.clone()
    }
}

/// Whether `key` may have this number.
fn may_have(number: u16, key: &str) -> bool {
    number < LONG_NAMES_MAX || key.len() <= NAMED_BYTES_MAX
}

/// Numbers are of 16 bits.
fn bounded(most: u32) -> usize {
    most.min(crate::limits::NAMES_MAX) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(names: &mut Names, table: &mut NameTable, key: &str) -> NameForm {
        let key: Arc<str> = key.into();
        let form = names.form(&key);
        names.named(&key, form);
        let seen = match form {
            NameForm::Plain => key.clone(),
            NameForm::Define(number) => {
                assert!(table.define(number, key.clone()));
                key.clone()
            }
            NameForm::Number(number) => table.get(number).unwrap(),
        };
        assert_eq!(seen, key);
        form
    }

    #[test]
    fn a_key_travels_once() {
        let (mut names, mut table) = (Names::new(8), NameTable::new(8));
        assert_eq!(request(&mut names, &mut table, "a"), NameForm::Define(0));
        assert_eq!(request(&mut names, &mut table, "b"), NameForm::Define(1));
        for _ in 0..3 {
            assert_eq!(request(&mut names, &mut table, "a"), NameForm::Number(0));
            assert_eq!(request(&mut names, &mut table, "b"), NameForm::Number(1));
        }
    }

    #[test]
    fn the_oldest_number_goes_to_a_new_key_and_both_ends_agree_always() {
        for most in [1, 2, 3, 7] {
            let (mut names, mut table) = (Names::new(most), NameTable::new(most));
            let mut state = 1u32;
            for _ in 0..2000 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                request(&mut names, &mut table, &format!("key {}", (state >> 16) % 10));
                assert!(names.keys.len() <= most as usize && names.numbers.len() == names.keys.len());
            }
        }
    }

    #[test]
    fn what_is_not_posted_changes_nothing() {
        let mut names = Names::new(2);
        assert_eq!(names.form(&"a".into()), NameForm::Define(0));
        assert_eq!(names.form(&"b".into()), NameForm::Define(0));
    }

    #[test]
    fn what_is_taken_back_in_reverse_order_never_was() {
        for most in [1, 2, 3, 5] {
            let (mut names, mut table) = (Names::new(most), NameTable::new(most));
            for round in 0..40 {
                let before = (names.numbers.clone(), names.keys.clone(), names.next);
                let mut defined = Vec::new();
                for number in 0..round % 7 {
                    let key: Arc<str> = format!("key {}", (round + number) % 9).into();
                    let form = names.form(&key);
                    defined.extend(names.named(&key, form));
                }
                defined.into_iter().rev().for_each(|defined| names.take_back(defined));
                assert_eq!((names.numbers.clone(), names.keys.clone(), names.next), before, "{most} {round}");
                request(&mut names, &mut table, &format!("key {}", round % 4));
            }
        }
    }

    #[test]
    fn without_numbers_every_key_is_plain() {
        let (mut names, mut table) = (Names::new(0), NameTable::new(0));
        assert_eq!(request(&mut names, &mut table, "a"), NameForm::Plain);
        assert_eq!(request(&mut names, &mut table, "a"), NameForm::Plain);
        assert!(!table.define(0, "a".into()));
    }

    #[test]
    fn s4_a_thousand_long_keys_have_a_number_and_the_others_are_spelt_out() {
        let most = u32::from(LONG_NAMES_MAX) + 2;
        let (mut names, mut table) = (Names::new(most), NameTable::new(most));
        let key = |number: u32, bytes: usize| format!("{number:->bytes$}");
        for number in 0..most {
            let is_long = number < LONG_NAMES_MAX.into();
            let bytes = if is_long { NAMED_BYTES_MAX + 1 } else { NAMED_BYTES_MAX };
            if number + 1 == most {
                assert_eq!(request(&mut names, &mut table, &key(number, bytes + 1)), NameForm::Plain);
            }
            assert_eq!(request(&mut names, &mut table, &key(number, bytes)), NameForm::Define(number as u16));
        }
        assert!(!table.define(LONG_NAMES_MAX, key(0, NAMED_BYTES_MAX + 1).into()));
    }

    #[test]
    fn numbers_that_were_not_agreed_or_not_defined_stand_for_nothing() {
        let mut table = NameTable::new(4);
        assert!(table.define(3, "a".into()));
        assert!(!table.define(4, "b".into()) && !table.define(u16::MAX, "b".into()));
        assert_eq!((table.get(0), table.get(4), table.get(u16::MAX)), (None, None, None));
    }
}

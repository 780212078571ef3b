//! Output of findings, as text and as JSON.

use std::fmt::Write;

use serde::Serialize;

use super::{Examination, cause::Status, finding::Finding, judge::place};
use crate::{console::document, failure::Failure, machine::Choice};

/// Version of the JSON: incremented when a field changes its meaning or is removed.
const VERSION: u32 = 1;

/// Whether RDMA can be used, in a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) usable: bool,
    pub(super) text: String,
}

/// The verdict that follows from `findings`.
pub(super) fn verdict(seen: &Examination, findings: &[Finding]) -> Verdict {
    let problem = findings.iter().find(|finding| finding.status == Status::Problem);
    match (problem, &seen.machine.choice) {
        (None, Ok(choice)) => Verdict { usable: true, text: format!("RDMA works here: {}", place(choice)) },
        (problem, _) => {
            let reason = problem.map_or("no device can be chosen".to_owned(), sentence);
            Verdict { usable: false, text: format!("RDMA cannot be used: {reason}; {}", instead(seen)) }
        }
    }
}

/// What Tensorwire uses without RDMA.
fn instead(seen: &Examination) -> String {
    let fabrics = match (&seen.shm, &seen.tcp) {
        (Ok(_), Ok(_)) => "shm and tcp",
        (Ok(_), Err(_)) => "shm",
        (Err(_), Ok(_)) => "tcp",
        (Err(_), Err(_)) => return "no fabric is left, since shm and tcp fail too".to_owned(),
    };
    format!("Tensorwire will use {fabrics}")
}

/// Subject and message.
pub(super) fn sentence(finding: &Finding) -> String {
    match &finding.subject {
        Some(subject) => format!("{subject}: {}", finding.message),
        None => finding.message.clone(),
    }
}

/// For people: one line per finding with its remedy below, the verdict last.
pub(super) fn text(findings: &[Finding], verdict: &Verdict) -> String {
    format!("{}\n{}\n", lines(findings, |_| true), verdict.text)
}

/// Only the warnings and the problems, with their remedies.
pub(super) fn quiet_text(findings: &[Finding]) -> String {
    lines(findings, |finding| finding.status != Status::Ok)
}

fn lines(findings: &[Finding], is_shown: impl Fn(&Finding) -> bool) -> String {
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings.iter().filter(|finding| is_shown(finding)) {
        let (status, check) = (finding.status.name(), finding.check);
        // Writing to a string does not fail.
        let _ = writeln!(text, "{status:<8} {check:<width$}  {}", sentence(finding));
        if let Some(remedy) = &finding.remedy {
            let _ = writeln!(text, "{:<8} {:<width$}  -> {remedy}", "", "");
        }
    }
    text
}

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct DoctorJson<'a> {
    version: u32,
    tensorwire: &'static str,
    usable: bool,
    verdict: &'a str,
    choice: Option<&'a Choice>,
    pool_bytes: u64,
    findings: &'a [Finding],
}

/// For programs: one object.
pub(super) fn json(seen: &Examination, findings: &[Finding], verdict: &Verdict) -> Result<String, Failure> {
    let report = DoctorJson {
        version: VERSION,
        tensorwire: env!("CARGO_PKG_VERSION"),
        usable: verdict.usable,
        verdict: &verdict.text,
        choice: seen.machine.choice.as_ref().ok(),
        pool_bytes: seen.pool_bytes,
        findings,
    };
    document(&report)
}

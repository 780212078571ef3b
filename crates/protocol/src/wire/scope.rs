//! How a request says where the sender looks for the value.

use std::num::NonZeroU64;

use super::codec::{Reader, Writer, check_length};
use crate::{
    CallTerms, Offered, OfferedArguments, PageWrite, Scope, SetContent, StepId, TraceContext, Wanted,
    WireError,
};

const SCOPE_STEP: u8 = 0;
const SCOPE_PUBLISHED: u8 = 1;
/// A published value, with VERSION.
const SCOPE_VERSIONED: u8 = 2;
/// As `SCOPE_VERSIONED`, and newer than that of the `u64` incarnation and `u64` version that follow.
const SCOPE_NEWER: u8 = 3;
/// As `SCOPE_STEP`, and answered at once.
const SCOPE_STEP_NOW: u8 = 4;
/// The offered tensor of the `u64` incarnation, `u64` edition and `u32` cell that follow.
const SCOPE_OFFERED: u8 = 5;
/// The head of a set's version that is newer than that of the `u64` incarnation and `u64` version that follow; if both are 0, of the
/// first one; if both are `u64::MAX`, of the present one.
const SCOPE_SET: u8 = 6;
/// The content of a set's version of the `u64` edition and `u32` number that follow. The highest bit of the number says that the receiver
/// needs no further one.
const SCOPE_SET_CONTENT: u8 = 7;
/// As `SCOPE_PUBLISHED`, of a slice. The key ends with it.
const SCOPE_SLICE: u8 = 8;
/// As `SCOPE_SET_CONTENT`, of a slice. The key ends with it.
const SCOPE_SET_SLICE: u8 = 9;
/// Pages of an arena, or of the write of the `u64` number that follows unless it is 0. The key ends with them.
const SCOPE_PAGES: u8 = 10;
/// Asks for a request of the pages of the write of the `u64` number that follows. The key ends with them.
const SCOPE_PAGE_WRITE: u8 = 11;
/// As `SCOPE_PAGE_WRITE`, with the `u64` note that follows the number.
const SCOPE_NOTED_WRITE: u8 = 12;

/// A call with the `u32` limit that follows, in milliseconds. Its arguments end the request.
const SCOPE_CALL: u8 = 13;
/// As `SCOPE_CALL`; the `u64` number and the `u64` length of the arguments follow, which are not in the request.
const SCOPE_OFFERING_CALL: u8 = 14;
/// The arguments of the `u64` number that follows.
const SCOPE_ARGUMENTS: u8 = 15;
/// The 16 bytes of a trace, the `u64` span and the flags follow, and then the scope of a call, which belongs to this span.
const SCOPE_TRACED: u8 = 16;

/// Added to the number of the last content that a receiver needs.
const SET_CONTENT_LAST: u32 = 1 << 31;

/// Incarnation and version with which a request wants the present version of a set. No version has this number.
const SET_NOW: (u64, u64) = (u64::MAX, u64::MAX);

pub(super) fn write(writer: &mut Writer<'_>, scope: Scope) {
    match scope {
        Scope::Step(StepId(step)) => {
            writer.u8(SCOPE_STEP);
            writer.i64(step);
        }
        Scope::StepNow(StepId(step)) => {
            writer.u8(SCOPE_STEP_NOW);
            writer.i64(step);
        }
        Scope::Published => writer.u8(SCOPE_PUBLISHED),
        Scope::Versioned(Wanted::Now) => writer.u8(SCOPE_VERSIONED),
        Scope::Versioned(Wanted::NewerThan { incarnation, version }) => {
            writer.u8(SCOPE_NEWER);
            writer.u64(incarnation);
            writer.u64(version);
        }
        Scope::Offered(Offered { incarnation, edition, cell }) => {
            writer.u8(SCOPE_OFFERED);
            writer.u64(incarnation);
            writer.u64(edition);
            writer.u32(cell);
        }
        Scope::Set(wanted) => {
            let (incarnation, version) = match wanted {
                Wanted::Now => SET_NOW,
                Wanted::NewerThan { incarnation, version } => (incarnation, version),
            };
            writer.u8(SCOPE_SET);
            writer.u64(incarnation);
            writer.u64(version);
        }
        Scope::SetContent(content) => {
            writer.u8(SCOPE_SET_CONTENT);
            write_content(writer, content);
        }
        Scope::Slice => writer.u8(SCOPE_SLICE),
        Scope::SetSlice(content) => {
            writer.u8(SCOPE_SET_SLICE);
            write_content(writer, content);
        }
        Scope::Pages(write) => {
            writer.u8(SCOPE_PAGES);
            writer.u64(write.map_or(0, NonZeroU64::get));
        }
        Scope::PageWrite(PageWrite { number, note }) => {
            writer.u8(if note.is_some() { SCOPE_NOTED_WRITE } else { SCOPE_PAGE_WRITE });
            writer.u64(number.get());
            note.into_iter().for_each(|note| writer.u64(note));
        }
        Scope::Call(CallTerms { limit_ms, offered, trace }) => {
            trace.into_iter().for_each(|trace| write_trace(writer, trace));
            writer.u8(if offered.is_some() { SCOPE_OFFERING_CALL } else { SCOPE_CALL });
            writer.u32(limit_ms);
            if let Some(OfferedArguments { number, bytes }) = offered {
                writer.u64(number.get());
                writer.u64(bytes);
            }
        }
        Scope::Arguments(number) => {
            writer.u8(SCOPE_ARGUMENTS);
            writer.u64(number.get());
        }
    }
}

fn write_trace(writer: &mut Writer<'_>, trace: TraceContext) {
    writer.u8(SCOPE_TRACED);
    writer.raw(&trace.trace_id().to_le_bytes());
    writer.u64(trace.span_id());
    writer.u8(trace.flags());
}

fn write_content(writer: &mut Writer<'_>, SetContent { edition, number, is_last }: SetContent) {
    writer.u64(edition);
    writer.u32(number & !SET_CONTENT_LAST | if is_last { SET_CONTENT_LAST } else { 0 });
}

pub(super) fn read(reader: &mut Reader<'_>) -> Result<Scope, WireError> {
    match reader.u8("scope")? {
        SCOPE_TRACED => read_traced(reader).map(Scope::Call),
        scope => read_untraced(reader, scope),
    }
}

fn read_traced(reader: &mut Reader<'_>) -> Result<CallTerms, WireError> {
    let trace = u128::from_le_bytes(reader.array("trace")?);
    let (span, flags) = (reader.u64("span")?, reader.u8("flags")?);
    let trace = TraceContext::new(trace, span, flags);
    let trace = trace.ok_or(WireError::Unknown { field: "trace", value: 0 })?;
    let scope = reader.u8("scope")?;
    match read_untraced(reader, scope)? {
        Scope::Call(call) => Ok(CallTerms { trace: Some(trace), ..call }),
        _ => Err(WireError::Unknown { field: "scope of a trace", value: scope.into() }),
    }
}

fn read_untraced(reader: &mut Reader<'_>, scope: u8) -> Result<Scope, WireError> {
    match scope {
        SCOPE_STEP => Ok(Scope::Step(StepId(reader.i64("step")?))),
        SCOPE_STEP_NOW => Ok(Scope::StepNow(StepId(reader.i64("step")?))),
        SCOPE_PUBLISHED => Ok(Scope::Published),
        SCOPE_VERSIONED => Ok(Scope::Versioned(Wanted::Now)),
        SCOPE_NEWER => {
            let (incarnation, version) = (reader.u64("incarnation")?, reader.u64("version")?);
            Ok(Scope::Versioned(Wanted::NewerThan { incarnation, version }))
        }
        SCOPE_OFFERED => {
            let (incarnation, edition) = (reader.u64("incarnation")?, reader.u64("edition")?);
            Ok(Scope::Offered(Offered { incarnation, edition, cell: reader.u32("cell")? }))
        }
        SCOPE_SET => match (reader.u64("incarnation")?, reader.u64("version")?) {
            SET_NOW => Ok(Scope::Set(Wanted::Now)),
            (incarnation, version) => Ok(Scope::Set(Wanted::NewerThan { incarnation, version })),
        },
        SCOPE_SET_CONTENT => read_set_content(reader).map(Scope::SetContent),
        SCOPE_SLICE => Ok(Scope::Slice),
        SCOPE_SET_SLICE => read_set_content(reader).map(Scope::SetSlice),
        SCOPE_PAGES => Ok(Scope::Pages(NonZeroU64::new(reader.u64("write")?))),
        SCOPE_PAGE_WRITE => {
            Ok(Scope::PageWrite(PageWrite { number: read_number(reader, "write")?, note: None }))
        }
        SCOPE_NOTED_WRITE => {
            let (number, note) = (read_number(reader, "write")?, Some(reader.u64("note")?));
            Ok(Scope::PageWrite(PageWrite { number, note }))
        }
        SCOPE_CALL => {
            Ok(Scope::Call(CallTerms { limit_ms: reader.u32("limit")?, offered: None, trace: None }))
        }
        SCOPE_OFFERING_CALL => {
            let (limit_ms, number) = (reader.u32("limit")?, read_number(reader, "arguments")?);
            let offered = Some(OfferedArguments { number, bytes: read_length(reader)? });
            Ok(Scope::Call(CallTerms { limit_ms, offered, trace: None }))
        }
        SCOPE_ARGUMENTS => Ok(Scope::Arguments(read_number(reader, "arguments")?)),
        value => Err(WireError::Unknown { field: "scope", value: value.into() }),
    }
}

fn read_number(reader: &mut Reader<'_>, field: &'static str) -> Result<NonZeroU64, WireError> {
    NonZeroU64::new(reader.u64(field)?).ok_or(WireError::Unknown { field, value: 0 })
}

/// Bytes of a content.
fn read_length(reader: &mut Reader<'_>) -> Result<u64, WireError> {
    let field = "bytes of the arguments";
    let bytes = reader.u64(field)?;
    check_length(field, bytes)?;
    Ok(bytes)
}

fn read_set_content(reader: &mut Reader<'_>) -> Result<SetContent, WireError> {
    let (edition, number) = (reader.u64("edition")?, reader.u32("number")?);
    let is_last = number & SET_CONTENT_LAST != 0;
    Ok(SetContent { edition, number: number & !SET_CONTENT_LAST, is_last })
}

//! Statuses as gRPC carries them.

use protocol::{
    Code, Status,
    limits::{STATUS_DETAILS_BYTES_MAX, STATUS_MESSAGE_BYTES_MAX},
};

/// Metadata of the refusal of a value that is to be asked for in pieces.
pub(super) const PIECES: &str = "tensorwire-pieces";

/// What the sender answers, with its details. What is too long to travel is cut.
pub(super) fn to_grpc(status: &Status) -> tonic::Status {
    let end = status.message.floor_char_boundary(STATUS_MESSAGE_BYTES_MAX);
    let message = status.message.get(..end).unwrap_or_default();
    let details = status.details.get(..STATUS_DETAILS_BYTES_MAX).unwrap_or(&status.details);
    let code = tonic::Code::from_i32(status.code as i32);
    tonic::Status::with_details(code, message, bytes::Bytes::copy_from_slice(details))
}

/// What the other end answered.
pub(super) fn from_grpc(status: &tonic::Status) -> Status {
    let number = u8::try_from(i32::from(status.code())).unwrap_or_default();
    let code = Code::from_number(number.into()).unwrap_or(Code::Unknown);
    let details = status.details();
    let details = details.get(..STATUS_DETAILS_BYTES_MAX).unwrap_or(details).to_vec();
    Status { code, message: status.message().to_owned(), details }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s7_every_status_leads_back_with_its_details() {
        for number in 1..=16 {
            let code = Code::from_number(number).unwrap();
            let status = Status { code, message: format!("näm {number}"), details: vec![0, 255, 7] };
            let mut headers = tonic::codegen::http::HeaderMap::new();
            to_grpc(&status).add_header(&mut headers).unwrap();
            assert_eq!(from_grpc(&tonic::Status::from_header_map(&headers).unwrap()), status);
        }
        let long = Status::new(Code::Internal, "ä".repeat(STATUS_MESSAGE_BYTES_MAX));
        assert_eq!(from_grpc(&to_grpc(&long)).message.len(), STATUS_MESSAGE_BYTES_MAX);
    }
}

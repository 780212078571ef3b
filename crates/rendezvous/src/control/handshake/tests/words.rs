//! The content of a proof, and the texts of a refusal on both sides.

use super::*;

#[test]
fn a_proof_is_over_the_role_the_connection_and_all_that_was_said() {
    let key = good();
    let TestSession { session, .. } = wire();
    let frame = ControlFrame::Proof { proof: NO_PROOF };
    for (role, label) in [
        (Role::Dialling, "tensorwire control, dialling end\0"),
        (Role::Accepting, "tensorwire control, accepting end\0"),
    ] {
        let mut transcript = Transcript::new(role, &session, key.as_ref());
        transcript.frames.extend_from_slice(b"said before");
        let proven = transcript.prove(role, &frame).unwrap();
        let (content, proof) = proven.split_last_chunk::<PROOF_BYTES>().unwrap();
        let mut by_hand = Hmac::<Sha256>::new_from_slice(b"the secret of this cluster").unwrap();
        by_hand.update(&[label.as_bytes(), b"over any connection\0", b"said before", content].concat());
        assert_eq!(proof[..], by_hand.finalize().into_bytes()[..]);
        assert!(transcript.verify(role, &proven) && !transcript.verify(role.other(), &proven));
        assert!(!transcript.verify(role, &proof[1..]), "it is shorter than a proof");
    }
}

#[test]
fn e_under_tls_a_name_must_be_in_the_certificate() {
    bounded(|| async {
        let (key, frames) = (good(), [hello("x", WIRE_VERSION)]);
        let mut connection = Connection::default().under_tls(1);
        connection.proven.as_mut().unwrap().names = TlsNames::Proven;
        for is_dialling in [true, false] {
            let TestSession { session, mut from, to, admitted } = wire_over(connection.clone());
            frames.iter().for_each(|frame| to.send(frame.clone()).unwrap());
            let met = match is_dialling {
                true => dialling(session, key.clone(), LIMIT).await,
                false => accepting(session, key.clone(), LIMIT).await,
            };
            let error = met.unwrap_err();
            assert!(matches!(&error, ControlError::NameNotProven { worker, .. } if worker == "x"), "{error}");
            let mut last = None;
            while let Some(frame) = from.recv().await {
                last = Some(ControlFrame::decode(&frame).unwrap());
            }
            let Some(ControlFrame::Goodbye { status }) = last else { panic!("it got no goodbye: {last:?}") };
            assert!(status.code == Code::PermissionDenied && status.message.starts_with("x is not proven"));
            assert!(!admitted.load(Ordering::Relaxed));
        }
    });
}

#[test]
fn a_refusal_is_told_as_what_it_is() {
    bounded(|| async {
        for code in [Code::PermissionDenied, Code::Unauthenticated, Code::Unavailable] {
            let goodbye = ControlFrame::Goodbye { status: Status::new(code, "go away") }.encode();
            for (met, ..) in [feed_acceptor(from_ref(&goodbye)).await, feed_dialler(from_ref(&goodbye)).await]
            {
                let error = met.unwrap_err();
                let is_expected = match code {
                    Code::PermissionDenied => {
                        matches!(&error, ControlError::Refused { detail, .. } if detail == "go away")
                    }
                    Code::Unauthenticated => matches!(error, ControlError::WrongSecret { .. }),
                    _ => matches!(error, ControlError::Misbehaved { .. }),
                };
                assert!(is_expected, "{error}");
            }
        }
    });
}

#[test]
fn another_life_of_a_worker_is_not_the_worker_itself() {
    bounded(|| async {
        let earlier = [hello("acceptor", WIRE_VERSION)];
        let (met, ..) = feed_acceptor(&earlier).await;
        assert!(matches!(met.unwrap_err(), ControlError::Lost { .. }), "its proof is waited for");
    });
}

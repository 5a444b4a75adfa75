use super::*;
use crate::client_type::testing::request;
use crate::sampling::TurnSampling;

#[test]
fn what_the_server_cannot_do_is_refused_by_name() {
    let refused = |change: fn(&mut TurnSampling)| {
        let mut request = request();
        change(&mut request.sampling);
        let error = check_for("teacher.client", &request).expect_err("is refused");
        error.param.expect("names a field")
    };
    assert!(check_for("teacher.client", &request()).is_ok());
    assert_eq!(refused(|sampling| sampling.logprobs = Some(0)), "logprobs");
    assert_eq!(refused(|sampling| sampling.truncation.top_k = 4), "top_k");
    assert_eq!(refused(|sampling| sampling.truncation.min_p = 0.1), "min_p");
    let choice = |sampling: &mut TurnSampling| {
        sampling.structured_outputs = Some(json!({"choice": ["a", "b"]}));
    };
    assert_eq!(refused(choice), "structured_outputs");
}

#[test]
fn answer_formats_are_openais_again() {
    let format =
        |outputs: Value| response_format("teacher.client", Some(&outputs)).expect("is known");
    assert_eq!(
        format(json!({"json_object": true})),
        Some(json!({"type": "json_object"}))
    );
    let schema = format(json!({"json": {"type": "object"}})).expect("is there");
    assert_eq!(schema["json_schema"]["schema"], json!({"type": "object"}));
    assert_eq!(
        response_format("teacher.client", None).expect("is nothing"),
        None
    );
}

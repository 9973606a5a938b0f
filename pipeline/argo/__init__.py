"""The Argo engine: the pipeline as a Workflow on a cluster, through the Kubernetes API.

What happens when:

    ==============================================  ==========================================================
    the same run is active already                  it is shown and followed; ``--force`` starts another one
    the answer to the submission is lost            asked again under the same name: there is one workflow
    another run of the model holds its lock         Pending with Argo's message; it starts when that one ends
    a pod is deleted, preempted or evicted          Argo tries the stage again; finished work is used again
    a stage runs out of memory (137)                the run fails with 137 and says so: more memory is needed
    a stage fails                                   the run fails with the stage's message, hint and exit code
    the API is not reachable, or answers 5xx, 429   tried again (Retry-After is respected), for ten minutes
                                                    while following; the run itself goes on meanwhile
    a watch has expired (410)                       listed anew and gone on
    forbidden, or not logged in                     ended at once, with what is not allowed (exit code 12)
    Argo or the template is not installed           ended at once, with how to install it (exit code 61)
    somebody deletes the workflow                   ended with exit code 51
    Ctrl-C while following                          the run goes on; how to see and to stop it is said
    ==============================================  ==========================================================
"""
